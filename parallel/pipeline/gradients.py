"""From a pipeline's backward passes to DeepSpeed: gradients of all micro-batches summed in fp32, then reduced once.

Zero-bubble schedules write gradients without autograd's hooks, so DeepSpeed sees none of them until the step's end.
Each rank therefore holds its stages' whole gradients during a step, under ZeRO 2 and 3 too: sharding them earlier would
need a reduction for every micro-batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallel.sizes import DEFAULT_SIZES


class GradientSums:
    """Sums up the micro-batches' gradients of one DeepSpeed engine's weights; state between steps is memory only.

    In fp32 autograd sums them in ``.grad``. In 16 bits they move on into fp32 after each backward pass: under ZeRO 1
    into DeepSpeed's own accumulators, under ZeRO 2 and 3 into ours, where DeepSpeed takes gradients in the weights'
    dtype, so the sum is rounded once.
    """

    def __init__(self, engine: Any, zero: int, dtype: torch.dtype, bucket: int = DEFAULT_SIZES.bucket) -> None:
        """``bucket``: elements of gradients that one collective reduces."""
        self.engine = engine
        self.bucket = bucket
        self.optimizer = engine.optimizer
        self.zero = zero
        self.is_fp32 = dtype == torch.float32
        self.has_bf16_optimizer = zero == 1 and dtype == torch.bfloat16
        self.sums: dict[nn.Parameter, Tensor] = {}

    @contextmanager
    def collect(self, finish: Callable[[], None] | None = None) -> Iterator[None]:
        """Around one step's schedule, which is given ``after_backward``: on leaving, gradients are reduced.

        ``finish`` is called when the sums are complete and before they are reduced (tied weights). All ranks call it.
        """
        engine = self.engine
        engine.enable_backward_allreduce = False
        engine.set_gradient_accumulation_boundary(False)
        if self.zero == 0 or self.has_bf16_optimizer:
            yield
            if finish is not None:
                finish()
            engine.set_gradient_accumulation_boundary(True)
            engine.allreduce_gradients(self.bucket)
            return
        with engine.coalesce_grad_reduction():
            yield
            if finish is not None:
                finish()
            self.hand_over()
        engine.set_gradient_accumulation_boundary(True)  # else engine.step does nothing

    @torch.no_grad()
    def after_backward(self, stage: nn.Module) -> None:
        """Takes one micro-batch's gradients of a stage's weights out of ``.grad``."""
        if self.is_fp32:
            return
        if self.has_bf16_optimizer:
            self.optimizer.update_hp_grads(clear_lp_grads=False)
            self.optimizer.clear_lp_grads(set_to_none=True)
            return
        for weight in stage.parameters():
            if weight.grad is None:
                continue
            if self.zero == 1:
                self.optimizer._fill_param_grad_accum_attribute(weight)
                continue
            if weight not in self.sums:
                self.sums[weight] = torch.zeros_like(weight.grad, dtype=torch.float32)
            self.sums[weight] += weight.grad
            weight.grad.zero_()  # kept: under ZeRO 3 a partitioned weight takes no new gradient

    def total(self, weight: nn.Parameter) -> Tensor:
        """Where the weight's sum lies, to be changed in place before it is reduced."""
        if self.is_fp32:
            gradient = weight.grad
        elif self.has_bf16_optimizer:
            gradient = getattr(weight, "_hp_grad", None)
        elif self.zero == 1:
            gradient = getattr(weight, "grad_accum", None)
        else:
            gradient = self.sums.get(weight)
        assert gradient is not None, "every weight takes part in every backward pass"
        return gradient

    @torch.no_grad()
    def hand_over(self) -> None:
        """Puts our own sums where DeepSpeed looks for gradients."""
        for weight, total in self.sums.items():
            assert weight.grad is not None
            weight.grad.copy_(total)
            total.zero_()
