"""ZeRO 1 and 2: fp32 masters and optimizer states are sharded, and under ZeRO 2 the reduced gradients too.

ZeRO 1 in bf16 is in ``parallel.zero.zero1_bf16``.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from modeling.optimizers.rule import UpdateRule
from parallel.zero.fragments import Share, concatenated, mapped_share, position
from parallel.zero.reduction import ReducedEachPass, reduced_at_the_end
from parallel.zero.sharding import HeldGradient, Sharding
from parallel.zero.weights import HeldWeight


class Zero1(Sharding):
    """ZeRO 1 in fp32 and fp16.

    Each group of weights lies in one flat tensor, of which each rank has a part as fp32 master.
    """

    stage = 1

    def optimizer_class(self) -> type:
        """Roundtable's subclass of DeepSpeedZeroOptimizer, which has ZeRO 1 and 2."""
        return self.patches.ZeroOptimizer12

    def reduce_all(self) -> None:
        """Averages the summed gradients over the replicas, by DeepSpeed.

        In fp32 without any replicas only DeepSpeed's epilogue runs, since its reduction would first copy all gradients
        into a buffer. In fp16 the reduction is needed in any case: it fills the partition that is updated.
        """
        if self.dtype != torch.float32 or any(weight.replicas.degree > 1 for weight in self.weights.values()):
            super().reduce_all()
            return
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self.optimizer.set_gradient_accumulation_boundary(True)
        self.optimizer.overlapping_partition_gradients_reduce_epilogue()

    @contextmanager
    def collect(self, finish: Callable[[], None]) -> Iterator[None]:
        """Around one step's passes: on leaving, DeepSpeed reduces the sums that ``after_backward`` has made."""
        with reduced_at_the_end(self.deepspeed):
            yield
            finish()

    def after_backward(self, stage: nn.Module) -> None:
        """In fp16, adds the stage's gradients to DeepSpeed's own fp32 sums; in fp32 autograd sums them itself."""
        if self.dtype == torch.float32:
            return
        with torch.no_grad():
            for weight in stage.parameters():
                self.optimizer._fill_param_grad_accum_attribute(weight)

    def total(self, weight: nn.Parameter) -> Tensor:
        """The weight's summed gradient: its ``.grad`` in fp32, else DeepSpeed's fp32 sum of the 16-bit gradients."""
        total = weight.grad if self.dtype == torch.float32 else getattr(weight, "grad_accum", None)
        assert total is not None, "every weight takes part in every backward pass"
        return total

    def gradients(self) -> list[HeldGradient]:
        """The weights with the parts of their gradients that lie in this rank's partitions."""
        found: list[HeldGradient] = []
        for group, parameters in enumerate(self.optimizer.params_in_partition):
            *parts, last = self.optimizer.averaged_gradients[group]
            if len(parts) < len(parameters):
                parts.append(last)  # else it is padding at the partition's end, not always marked by DeepSpeed
            found += [(parameter, part, 1) for part, parameter in zip(parts, parameters, strict=True)]
        return found

    def flat_gradient(self, flat: Tensor) -> Tensor:
        """The gradient of the partition ``flat``, from DeepSpeed's slices, with the padding last."""
        group = position(self.optimizer.single_partition_of_fp32_groups, flat)
        return concatenated(self.optimizer.averaged_gradients[group], flat)

    def flats(self) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """This rank's fp32 partition of each group, with the group's weights."""
        return list(zip(self.optimizer.single_partition_of_fp32_groups, self.optimizer.bit16_groups, strict=True))

    def share_of(self, weight: HeldWeight) -> Share | None:
        """This rank's share of the weight's master, from DeepSpeed's own mapping; None where it has none."""
        return mapped_share(weight.parameter)

    def publish(self, rule: UpdateRule) -> None:
        """Copies this rank's masters into its part of the weights, and all-gathers the weights over the replicas."""
        self.optimizer.update_lp_params()


class Zero2(ReducedEachPass, Zero1):
    """ZeRO 2 in every precision: between micro-batches a rank keeps only its part of the gradients."""

    stage = 2
