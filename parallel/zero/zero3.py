"""ZeRO 3: weights are sharded too; DeepSpeed's hooks all-gather them for each module's forward and backward pass."""

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from modeling.optimizers.rule import UpdateRule
from parallel.layout import Place
from parallel.zero.fragments import Share, concatenated, even_share, position
from parallel.zero.groups import mark_for_zero3
from parallel.zero.reduction import ReducedEachPass
from parallel.zero.sharding import HeldGradient
from parallel.zero.weights import HeldWeight


class Zero3(ReducedEachPass):
    """ZeRO 3: each weight is cut into even parts; a rank's parts of a group of weights have one flat fp32 master."""

    stage = 3
    needs_equal_graphs = True
    weights_stay = False
    shows_experts = False  # DeepSpeed refuses its own kind of experts here, and takes marks on the weights

    @cached_property
    def partition(self) -> Any:
        """DeepSpeed's ``zero.Init`` object, which partitions a weight as soon as it is made."""
        import deepspeed

        group = self.mesh.replicas.group
        make = self.patches.in_place_of_local_rank(deepspeed.zero.Init)
        return make(data_parallel_group=group, config_dict_or_path=self.config, dtype=self.dtype)

    def adopt(self, parameter: nn.Parameter, place: Place) -> None:
        """Partitions the weight over its replicas at once, so that a rank never holds the whole model."""
        super().adopt(parameter, place)
        mark_for_zero3(parameter, place, self.mesh)
        self.partition._convert_to_zero_parameters([parameter])

    def optimizer_class(self) -> type:
        """Roundtable's subclass of DeepSpeedZeroOptimizer_Stage3."""
        return self.patches.ZeroOptimizer3

    def gradients(self) -> list[HeldGradient]:
        """All weights with this rank's parts of their gradients."""
        found: list[HeldGradient] = []
        for group, parameters in enumerate(self.optimizer.fp16_groups):
            parts = self.optimizer.averaged_gradients[group]
            found += [(parameter, part, 1) for part, parameter in zip(parts, parameters, strict=True)]
        return found

    def flat_gradient(self, flat: Tensor) -> Tensor:
        """The gradient of the group's master ``flat``: the weights' parts one after another, each padded."""
        group = position(self.optimizer.fp32_partitioned_groups_flat, flat)
        return concatenated(self.optimizer.averaged_gradients[group], flat)

    def flats(self) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """This rank's fp32 master of each group, with the group's weights; DeepSpeed has divided large groups."""
        return list(zip(self.optimizer.fp32_partitioned_groups_flat, self.optimizer.fp16_groups, strict=True))

    def share_of(self, weight: HeldWeight) -> Share | None:
        """This rank's even share of the weight's elements; None where it has none."""
        optimizer, parameter = self.optimizer, weight.parameter
        start, numel = even_share(parameter.ds_numel, weight.replicas)  # pyright: ignore[reportAttributeAccessIssue]
        if numel <= 0:
            return None
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        return Share(start, numel, optimizer.fp32_partitioned_groups_flat[group], offset)

    def publish(self, rule: UpdateRule) -> None:
        """Copies the masters into this rank's parts of the weights, and all-gathers small weights that stay whole."""
        optimizer = self.optimizer
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer.fp16_partitioned_groups_flat[group].data.copy_(optimizer.fp32_partitioned_groups_flat[group].data)
            optimizer._unflatten_partitioned_parameters(group)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)

    def kept(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the weight, without the last ranks' padding, which holds uninitialized memory."""
        part, n_whole = parameter.ds_tensor.detach(), parameter.ds_numel  # pyright: ignore[reportAttributeAccessIssue]
        _, numel = even_share(n_whole, self.weights[parameter].replicas)
        return part[: max(0, numel)]
