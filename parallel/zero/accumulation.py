"""Accumulation of gradients: a flat fp32 sum takes a flat gradient of the weights' dtype, in one pass over both.

On a GPU torch's own kernels for two dtypes read number by number: on an H200 (torch 2.11) they moved 2.8 TB/s where a
copy within its memory moved 4.2. Compiled they are vectorized (``docs/performance.md``).
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import NamedTuple

import torch
from torch import Tensor

from modeling.kernels.direct import Direct, is_plain
from modeling.kernels.fuse import Fuse, compiled
from parallel.zero.norm import ALIGNED, CPU_PIECE, WORTH_IT

MOST = 1 << 31  # elements that a kernel counts in 32 bits

Take = Callable[[Tensor, Tensor], None]


class Accumulation(NamedTuple):
    """How a flat sum takes a flat gradient. Both change the sum in place, outside of autograd."""

    add: Take  # to what the sum holds
    write: Take  # over it


def accumulation_by(fuse: Fuse) -> Accumulation:
    """Compiled on a GPU where chains are; else torch's own."""
    return COMPILED if fuse is compiled else PLAIN


@torch.no_grad()
def add(total: Tensor, gradient: Tensor) -> None:
    """Plainly. On a CPU torch widens the gradient first, whole, in new memory: it goes in pieces."""
    if not total.is_cpu:
        total += gradient
        return
    for piece, added in zip(total.split(CPU_PIECE), gradient.split(CPU_PIECE), strict=True):
        piece += added


@torch.no_grad()
def write(total: Tensor, gradient: Tensor) -> None:
    """Writes the gradient over ``total``, by torch's own kernel."""
    total.copy_(gradient)


PLAIN = Accumulation(add, write)


def add_in_one_pass(total: Tensor, gradient: Tensor) -> None:
    """``add``, on a GPU compiled."""
    accumulate(total, gradient, adds=True)


def write_in_one_pass(total: Tensor, gradient: Tensor) -> None:
    """``write``, on a GPU compiled."""
    accumulate(total, gradient, adds=False)


COMPILED = Accumulation(add_in_one_pass, write_in_one_pass)


def accumulate(total: Tensor, gradient: Tensor, *, adds: bool) -> None:
    """One operator, ``roundtable::accumulate(total, gradient, adds)``, of which fake tensors see no more than that."""
    if total.is_cpu:
        (add if adds else write)(total, gradient)
    elif is_plain((total, gradient)):
        accumulate_there(total, gradient, adds)
    else:
        _library()
        torch.ops.roundtable.accumulate(total.detach(), gradient.detach(), adds)


@torch.no_grad()
def accumulate_there(total: Tensor, gradient: Tensor, adds: bool) -> None:
    """What the operator does. Compiled kernels are made for places at which vectors may begin, and for any length."""
    is_fit = (total.data_ptr() | gradient.data_ptr()) % ALIGNED == 0
    if not is_fit or not WORTH_IT <= total.numel() < MOST:
        (add if adds else write)(total, gradient)
        return
    _compiled(adds, total.dtype, gradient.dtype)((total, gradient))


def add_flat(total: Tensor, gradient: Tensor) -> None:
    """``add``, as it is compiled."""
    total.add_(gradient)


def write_flat(total: Tensor, gradient: Tensor) -> None:
    """``write``, as it is compiled."""
    total.copy_(gradient)


@cache
def _compiled(adds: bool, *_: torch.dtype) -> Direct:
    """Of one pair of dtypes, so that sizes alone are looked at in each call.

    Of its own code object: torch counts the versions that it compiles of each.
    """
    function = add_flat if adds else write_flat
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return Direct(own, rows_vary=True)


@cache
def _library() -> torch.library.Library:
    """The operator, defined when it is first called."""
    library = torch.library.Library("roundtable", "FRAGMENT")
    library.define("accumulate(Tensor(a!) total, Tensor gradient, bool adds) -> ()")
    library.impl("accumulate", accumulate_there, "CompositeExplicitAutograd")
    torch.library.register_fake("roundtable::accumulate", lambda total, gradient, adds: None, lib=library)
    return library
