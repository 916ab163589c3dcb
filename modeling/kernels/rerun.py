"""Functions that save only their arguments for the backward pass, which computes the rest again."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


class Cuts(NamedTuple):
    """How to call a function on pieces of its arguments instead of once, each giving a piece of the value."""

    pieces: Sequence[tuple[Any, ...]]  # each: an index for each of the leading arguments; the others are passed whole
    shaped_as: int  # the number of the argument whose shape, dtype and pieces the value has


# (arguments, numbers of those by which it is differentiated, the value's gradient) -> their gradients
Backward = Callable[[Sequence[Any], Sequence[int], Tensor], tuple[Tensor, ...]]


def rerun(
    function: Callable[..., Tensor], *arguments: Any, cuts: Cuts | None = None, backward: Backward | None = None
) -> Tensor:
    """``function(*arguments)``, whose gradients come from a second run in the backward pass, or from ``backward``.

    With ``cuts`` both passes go piece by piece. Pieces of the arguments that are differentiated by must not overlap.
    """
    if not torch.is_grad_enabled():
        return run(function, arguments, cuts)
    return _Rerun.apply(function, cuts, backward or partial(gradients, function), *arguments)


def run(function: Callable[..., Tensor], arguments: Sequence[Any], cuts: Cuts | None) -> Tensor:
    """The function's whole value, computed piece by piece if there are ``cuts``."""
    if cuts is None:
        return function(*arguments)
    made = torch.empty_like(arguments[cuts.shaped_as], memory_format=torch.contiguous_format)
    for piece in cuts.pieces:
        made[piece[cuts.shaped_as]] = function(*cut(arguments, piece))
    return made


def cut(arguments: Sequence[Any], piece: tuple[Any, ...]) -> list[Any]:
    """The function's arguments for one piece."""
    return [each[index] for each, index in zip(arguments, piece, strict=False)] + list(arguments[len(piece) :])


class _Rerun(Function):
    """(function, cuts, backward, *arguments) -> the function's value. Arguments may be other things than tensors."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, function: Callable[..., Tensor], cuts: Cuts | None, backward: Backward, *arguments: Any
    ) -> Tensor:
        ctx.differentiated, ctx.cuts = backward, cuts
        ctx.others = [None if isinstance(each, Tensor) else each for each in arguments]
        ctx.is_tensor = [isinstance(each, Tensor) for each in arguments]
        ctx.save_for_backward(*(each for each in arguments if isinstance(each, Tensor)))
        return run(function, arguments, cuts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = iter(ctx.saved_tensors)  # read only once, as recomputation requires
        arguments = [next(saved) if is_one else each for is_one, each in zip(ctx.is_tensor, ctx.others, strict=True)]
        wanted = [number for number, wants in enumerate(ctx.needs_input_grad[3:]) if wants]
        found: list[Tensor | None] = [None] * len(arguments)
        if ctx.cuts is None:
            for number, each in zip(wanted, ctx.differentiated(arguments, wanted, grad), strict=True):
                found[number] = each
            return None, None, None, *found
        wholes = [torch.empty_like(arguments[number], memory_format=torch.contiguous_format) for number in wanted]
        for piece in ctx.cuts.pieces:
            here = ctx.differentiated(cut(arguments, piece), wanted, grad[piece[ctx.cuts.shaped_as]])
            for number, whole, each in zip(wanted, wholes, here, strict=True):
                whole[piece[number]] = each
        for number, whole in zip(wanted, wholes, strict=True):
            found[number] = whole
        return None, None, None, *found


def gradients(
    function: Callable[..., Tensor], arguments: Sequence[Any], wanted: Sequence[int], grad: Tensor
) -> tuple[Tensor, ...]:
    """The gradients by the arguments whose numbers are in ``wanted``, by running the function again."""
    given = list(arguments)
    for number in wanted:
        given[number] = given[number].detach().requires_grad_()
    with torch.enable_grad():
        made = function(*given)
    return torch.autograd.grad(made, [given[number] for number in wanted], grad)
