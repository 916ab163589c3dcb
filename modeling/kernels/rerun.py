"""Functions that keep what they are given for the backward pass, and nothing else: that computes them again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def rerun(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """``function(*arguments)``; its gradients are of a second run, within the backward pass."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return _Rerun.apply(function, *arguments)


class _Rerun(Function):
    """(function, *arguments) -> the function's value. Arguments that are no tensors are kept as they are."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *arguments: Any) -> Tensor:  # type: ignore[override]
        ctx.function = function
        ctx.others = [None if isinstance(each, Tensor) else each for each in arguments]
        ctx.is_tensor = [isinstance(each, Tensor) for each in arguments]
        ctx.save_for_backward(*(each for each in arguments if isinstance(each, Tensor)))
        return function(*arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = iter(ctx.saved_tensors)  # recomputation gives them once
        arguments = [next(saved) if is_one else each for is_one, each in zip(ctx.is_tensor, ctx.others, strict=True)]
        wanted = [number for number, wants in enumerate(ctx.needs_input_grad[1:]) if wants]
        for number in wanted:
            arguments[number] = arguments[number].detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.function(*arguments)
        grads = torch.autograd.grad(made, [arguments[number] for number in wanted], grad)
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for number, each in zip(wanted, grads, strict=True):
            found[number + 1] = each
        return tuple(found)
