"""From backward passes to DeepSpeed's reduction: gradients of a step's micro-batches summed, then averaged.

Zero-bubble schedules of a pipeline write gradients without autograd's hooks, so DeepSpeed sees none of them until the
step's end. There each rank holds its stages' whole gradients during a step, under ZeRO 2 and 3 too: sharding them
earlier would need a reduction for every micro-batch.
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
    """Around one step's backward passes: on leaving, DeepSpeed reduces what lies in its places (ZeRO 1, 2 and 3)."""
    engine.set_gradient_accumulation_boundary(False)
    with engine.coalesce_grad_reduction():
        yield
    engine.set_gradient_accumulation_boundary(True)  # else engine.step does nothing


class ReducedEachPass(Sharding):
    """Of ZeRO 2 and 3: gradients are reduced and sharded after each micro-batch; under a pipeline at the step's end."""

    rounds_sums = True

    @cached_property
    def sums(self) -> "GradientSums":
        """A pipeline's sums until then."""
        return GradientSums(self.dtype, self.accumulation)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the pass's gradients to this rank's part of DeepSpeed's fp32 sums."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        torch.autograd.backward(loss)
        self.deepspeed.allreduce_gradients()
        self.optimizer.clear_backward_seen_flag()

    @contextmanager
    def collect(self, finish: Callable[[], None]) -> Iterator[None]:
        """Reduces our own sums, rounded once to the weights' dtype."""
        with reduced_at_the_end(self.deepspeed):
            yield
            finish()
            self.sums.hand_over()

    def after_backward(self, stage: nn.Module) -> None:
        """Adds one micro-batch's gradients to our own sums."""
        self.sums.add(stage)

    def total(self, weight: nn.Parameter) -> Tensor:
        """Where our own fp32 sum of the weight's gradient lies."""
        return self.sums.total(weight)


class GradientSums:
    """Sums of micro-batches' gradients in fp32, until DeepSpeed takes one gradient in the weights' dtype.

    In fp32 autograd makes the sums, in ``.grad``. State between steps is memory only.
    """

    def __init__(self, dtype: torch.dtype, accumulation: Accumulation) -> None:
        """``dtype``: the weights'."""
        self.dtype = dtype
        self.accumulation = accumulation
        self.sums: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def add(self, stage: nn.Module) -> None:
        """Takes one micro-batch's gradients of a stage's weights out of ``.grad``."""
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
        """Where the weight's sum lies."""
        total = weight.grad if self.dtype == torch.float32 else self.sums.get(weight)
        assert total is not None, "every weight takes part in every backward pass"
        return total

    @torch.no_grad()
    def hand_over(self) -> None:
        """Puts the sums where DeepSpeed looks for gradients, and begins anew."""
        for weight, total in self.sums.items():
            assert weight.grad is not None
            weight.grad.copy_(total)
            total.zero_()
