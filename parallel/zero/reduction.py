"""Gradient accumulation for ZeRO 2 and 3: the gradients of a step's micro-batches are summed, then averaged.

Zero-bubble pipeline schedules write gradients without calling autograd's hooks, so DeepSpeed gets none of them until
the step's end. Under a pipeline each rank therefore holds its stages' whole gradients during a step, under ZeRO 2 and 3
too; sharding them earlier would need a reduction for every micro-batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from parallel.zero.accumulation import Accumulation
from parallel.zero.sharding import Sharding


@contextmanager
def reduced_at_the_end(engine: Any) -> Iterator[None]:
    """The context of one step's backward passes: on leaving, DeepSpeed reduces the gradients (ZeRO 1, 2 and 3).

    It takes them from ``.grad``, or from its own sums.
    """
    engine.set_gradient_accumulation_boundary(False)
    with engine.coalesce_grad_reduction():
        yield
    engine.set_gradient_accumulation_boundary(True)  # else engine.step does nothing


class ReducedEachPass(Sharding):
    """The part that ZeRO 2 and 3 share: gradients are reduced and sharded after each micro-batch.

    Under a pipeline that is done once, at the step's end.
    """

    rounds_sums = True

    @cached_property
    def sums(self) -> "GradientSums":
        """The fp32 sums of a pipeline's gradients, until they are reduced at the step's end."""
        return GradientSums(self.dtype, self.accumulation)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """One micro-batch's backward pass; adds its reduced gradients to this rank's part of DeepSpeed's fp32 sums."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        torch.autograd.backward(loss)
        self.deepspeed.allreduce_gradients()
        self.optimizer.clear_backward_seen_flag()

    @contextmanager
    def collect(self, finish: Callable[[], None]) -> Iterator[None]:
        """Around a pipeline's passes: on leaving, the fp32 sums, rounded once to the weights' dtype, are reduced."""
        with reduced_at_the_end(self.deepspeed):
            yield
            finish()
            self.sums.hand_over()

    def after_backward(self, stage: nn.Module) -> None:
        """Adds one micro-batch's gradients of a stage's weights to the fp32 sums."""
        self.sums.add(stage)

    def total(self, weight: nn.Parameter) -> Tensor:
        """The fp32 sum of the weight's gradients."""
        return self.sums.total(weight)


class GradientSums:
    """Sums of micro-batches' gradients in fp32, from which DeepSpeed gets one gradient in the weights' dtype a step.

    With fp32 weights autograd itself makes the sums, in ``.grad``. Between steps the sums are zero; only their memory
    is kept.
    """

    def __init__(self, dtype: torch.dtype, accumulation: Accumulation) -> None:
        """``dtype``: that of the weights."""
        self.dtype = dtype
        self.accumulation = accumulation
        self.sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def add(self, stage: nn.Module) -> None:
        """Adds one micro-batch's gradients of a stage's weights to the sums, and zeroes ``.grad``."""
        if self.dtype == torch.float32:
            return
        for weight in stage.parameters():
            if weight.grad is None:
                continue
            if weight not in self.sums:
                self.sums[weight] = torch.zeros_like(weight.grad, dtype=torch.float32)
            self.accumulation.add(self.sums[weight].view(-1), weight.grad.reshape(-1))
            weight.grad.zero_()  # kept: under ZeRO 3 a partitioned weight takes no new gradient

    def total(self, weight: nn.Parameter) -> Tensor:
        """The tensor with the weight's sum."""
        total = weight.grad if self.dtype == torch.float32 else self.sums.get(weight)
        assert total is not None, "every weight takes part in every backward pass"
        return total

    @torch.no_grad()
    def hand_over(self) -> None:
        """Copies the sums to ``.grad``, where DeepSpeed takes gradients, and zeroes the sums."""
        for weight, total in self.sums.items():
            assert weight.grad is not None
            weight.grad.copy_(total)
            total.zero_()
