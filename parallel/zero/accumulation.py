"""Gradient accumulation: adds a flat gradient of the weights' dtype to a flat fp32 sum, in one pass over both.

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
    """The two operations (sum, gradient) on flat tensors, which change the sum in place, outside of autograd."""

    add: Take  # adds the gradient to the sum
    write: Take  # overwrites the sum with the gradient


def accumulation_by(fuse: Fuse) -> Accumulation:
    """The accumulation for a way of computing chains: compiled on GPUs where chains are compiled, else torch's own."""
    return COMPILED if fuse is compiled else PLAIN


@torch.no_grad()
def add(total: Tensor, gradient: Tensor) -> None:
    """Adds the gradient to ``total`` by torch's own kernel.

    On a CPU this is done in pieces, since torch would first widen the whole gradient in new memory.
    """
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
    """Adds the gradient to ``total``, by a compiled kernel on a GPU."""
    accumulate(total, gradient, adds=True)


def write_in_one_pass(total: Tensor, gradient: Tensor) -> None:
    """Writes the gradient over ``total``, by a compiled kernel on a GPU."""
    accumulate(total, gradient, adds=False)


COMPILED = Accumulation(add_in_one_pass, write_in_one_pass)


def accumulate(total: Tensor, gradient: Tensor, *, adds: bool) -> None:
    """Adds the gradient to ``total`` (``adds``), or writes it over ``total``.

    For fake tensors it is one operator, ``roundtable::accumulate(total, gradient, adds)``, that computes nothing.
    """
    if total.is_cpu:
        (add if adds else write)(total, gradient)
    elif is_plain((total, gradient)):
        accumulate_there(total, gradient, adds)
    else:
        _library()
        torch.ops.roundtable.accumulate(total.detach(), gradient.detach(), adds)


@torch.no_grad()
def accumulate_there(total: Tensor, gradient: Tensor, adds: bool) -> None:
    """The work of the operator: by a compiled kernel if the tensors are aligned for vectors and large enough."""
    is_fit = (total.data_ptr() | gradient.data_ptr()) % ALIGNED == 0
    if not is_fit or not WORTH_IT <= total.numel() < MOST:
        (add if adds else write)(total, gradient)
        return
    _compiled(adds, total.dtype, gradient.dtype)((total, gradient))


def add_flat(total: Tensor, gradient: Tensor) -> None:
    """The addition as a plain function, to be compiled."""
    total.add_(gradient)


def write_flat(total: Tensor, gradient: Tensor) -> None:
    """The overwriting as a plain function, to be compiled."""
    total.copy_(gradient)


@cache
def _compiled(adds: bool, *_: torch.dtype) -> Direct:
    """The compiled kernel for one pair of dtypes, so that each call checks sizes only.

    It has a code object of its own, since torch counts the versions that it compiles of each.
    """
    function = add_flat if adds else write_flat
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return Direct(own, rows_vary=True)


@cache
def _library() -> torch.library.Library:
    """The torch library with the operator, which is defined at the first call."""
    library = torch.library.Library("roundtable", "FRAGMENT")
    library.define("accumulate(Tensor(a!) total, Tensor gradient, bool adds) -> ()")
    library.impl("accumulate", accumulate_there, "CompositeExplicitAutograd")
    torch.library.register_fake("roundtable::accumulate", lambda total, gradient, adds: None, lib=library)
    return library
