"""Faults in how micro-batches' gradients are summed up: in 16 bits. For prove_faults.plant."""

from typing import Any

import torch


def let_deepspeed_accumulate(dtype: str) -> None:
    """DeepSpeed's accumulators have 16 bits."""
    import parallel.zero.engine as engine_module

    settings = engine_module.deepspeed_config

    def in_16_bits(*arguments: Any, **options: Any) -> dict[str, Any]:
        return settings(*arguments, **options) | {"data_types": {"grad_accum_dtype": dtype}}

    engine_module.deepspeed_config = in_16_bits


def let_autograd_accumulate() -> None:
    """ZeRO 1 in bf16: gradients are summed in the weights' ``.grad``, and DeepSpeed's fp32 accumulators get the sum."""
    from parallel.zero.engine import Engine

    keeps = Engine.keeps_bf16_accumulators
    backward = Engine.backward

    def late(self: Any, loss: torch.Tensor, *, last: bool) -> None:
        if not keeps.fget(self):
            backward(self, loss, last=last)
            return
        torch.autograd.backward(loss)
        if last:
            self.optimizer.update_hp_grads(clear_lp_grads=True)
            self.deepspeed.set_gradient_accumulation_boundary(True)
            self.deepspeed.allreduce_gradients()

    Engine.backward = late


def keep_sums_in_bf16() -> None:
    """A pipeline's own sums, under ZeRO 2 and 3, are rounded to bf16 after each micro-batch."""
    from parallel.pipeline.gradients import GradientSums

    take = GradientSums.after_backward

    def rounding(self: Any, stage: Any) -> None:
        take(self, stage)
        for total in self.sums.values():
            total.copy_(total.bfloat16())

    GradientSums.after_backward = rounding
