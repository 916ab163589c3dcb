"""Faults that accumulate gradients over micro-batches in 16 bits. Planted by prove_faults.plant."""

from typing import Any

import torch


def let_deepspeed_accumulate(dtype: str) -> None:
    """DeepSpeed's gradient accumulators have the 16-bit ``dtype``."""
    import parallel.zero.sharding as sharding

    settings = sharding.deepspeed_config

    def in_16_bits(*arguments: Any, **options: Any) -> dict[str, Any]:
        return settings(*arguments, **options) | {"data_types": {"grad_accum_dtype": dtype}}

    sharding.deepspeed_config = in_16_bits


def let_autograd_accumulate() -> None:
    """ZeRO 1 in bf16: gradients are summed in the weights' ``.grad``, and DeepSpeed's fp32 accumulators get the sum."""
    from parallel.zero.zero1_bf16 import Zero1Bf16

    def nothing(*_: Any) -> None:
        """Leaves the gradient where it is."""

    def late(self: Any, loss: torch.Tensor, *, last: bool) -> None:
        torch.autograd.backward(loss)
        if last:
            self.optimizer.update_hp_grads(clear_lp_grads=True)
            self.reduce_all()

    Zero1Bf16.take, Zero1Bf16.backward = nothing, late


def keep_sums_in_bf16() -> None:
    """A pipeline's own sums, under ZeRO 2 and 3, are rounded to bf16 after each micro-batch."""
    from parallel.zero.reduction import GradientSums

    take = GradientSums.add

    def rounding(self: Any, stage: Any) -> None:
        take(self, stage)
        for total in self.sums.values():
            total.copy_(total.bfloat16())

    GradientSums.add = rounding
