"""ZeRO 1 and 2: fp32 masters and optimizer states are sharded, under 2 reduced gradients too (not ZeRO 1 in bf16)."""

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
    """In fp32 and fp16. Each group of weights lies in one flat tensor, of which each rank has a part as fp32 master."""

    stage = 1

    def optimizer_class(self) -> type:
        """Our subclass of DeepSpeedZeroOptimizer, which has ZeRO 1 and 2."""
        return self.patches.ZeroOptimizer12

    def reduce_all(self) -> None:
        """DeepSpeed's reduction, or in fp32 where no weight has another replica what follows it alone.

        Its reduction would copy all gradients into a buffer first; in fp16 it fills the partition that is updated.
        """
        if self.dtype != torch.float32 or any(weight.replicas.degree > 1 for weight in self.weights.values()):
            super().reduce_all()
            return
        self.deepspeed.set_gradient_accumulation_boundary(True)
        self.optimizer.set_gradient_accumulation_boundary(True)
        self.optimizer.overlapping_partition_gradients_reduce_epilogue()

    @contextmanager
    def collect(self, finish: Callable[[], None]) -> Iterator[None]:
        """Reduces what ``after_backward`` has left in DeepSpeed's places."""
        with reduced_at_the_end(self.deepspeed):
            yield
            finish()

    def after_backward(self, stage: nn.Module) -> None:
        """In fp16 adds the gradients to DeepSpeed's own fp32 sums."""
        if self.dtype == torch.float32:
            return
        with torch.no_grad():
            for weight in stage.parameters():
                self.optimizer._fill_param_grad_accum_attribute(weight)

    def total(self, weight: nn.Parameter) -> Tensor:
        """The gradient in fp32, or DeepSpeed's sum of 16-bit ones."""
        total = weight.grad if self.dtype == torch.float32 else getattr(weight, "grad_accum", None)
        assert total is not None, "every weight takes part in every backward pass"
        return total

    def gradients(self) -> list[HeldGradient]:
        """The parts of gradients that lie in this rank's partitions."""
        found: list[HeldGradient] = []
        for group, parameters in enumerate(self.optimizer.params_in_partition):
            *parts, last = self.optimizer.averaged_gradients[group]
            if len(parts) < len(parameters):
                parts.append(last)  # else it is the padding at the partition's end, of which DeepSpeed marks only some
            found += [(parameter, part, 1) for part, parameter in zip(parts, parameters, strict=True)]
        return found

    def flat_gradient(self, flat: Tensor) -> Tensor:
        """The slices of the partition, padding last."""
        group = position(self.optimizer.single_partition_of_fp32_groups, flat)
        return concatenated(self.optimizer.averaged_gradients[group], flat)

    def flats(self) -> list[tuple[Tensor, list[nn.Parameter]]]:
        """This rank's fp32 partition of each group, with the group's weights."""
        return list(zip(self.optimizer.single_partition_of_fp32_groups, self.optimizer.bit16_groups, strict=True))

    def share_of(self, weight: HeldWeight) -> Share | None:
        """As DeepSpeed's own mapping says."""
        return mapped_share(weight.parameter)

    def publish(self, rule: UpdateRule) -> None:
        """Copies the masters into the weights, and gathers them."""
        self.optimizer.update_lp_params()


class Zero2(ReducedEachPass, Zero1):
    """In every precision. Between micro-batches a rank keeps its part of the gradients only."""

    stage = 2
