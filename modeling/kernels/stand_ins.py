"""Says which operations of torch stand in for one kernel in C++, to whoever counts the operations of a step.

Fake tensors have no memory that C++ could read, and a mode that observes operations would not see its kernels. So there
torch computes what a CPU otherwise computes in C++, and an observer that asks for the time of a step needs to know.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from modeling.kernels.scratch import is_real

Pass = Literal["forward", "backward"]


class KernelCall(NamedTuple):
    """One call of a kernel in C++: its name, its dtype, the shape on which its speed depends, and its work."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    n_bytes: int = 0  # that it moves, where it has no products
    flops: float = 0.0  # of its products


class Observer(Protocol):
    """Who wants to know."""

    def instead_of(self, kernel: KernelCall) -> AbstractContextManager[None]:
        """A context in which operations of torch stand in for this kernel."""
        ...


OBSERVERS: list[Observer] = []  # the last one is told


Made = TypeVar("Made")


def stand_in(
    kernel: Callable[[], KernelCall | None] | None, like: Tensor, compute: Callable[[], Made], empty: Callable[[], Made]
) -> Made:
    """The value of ``compute``, which C++ would compute if nothing observed it: the kernel that ``kernel()`` names.

    Where somebody observes, they are told of the kernel. Of fake tensors, such as ``like``, the value is then made by
    ``empty``: nobody asks what torch's operations would be.
    """
    found = kernel() if OBSERVERS and kernel is not None else None
    if found is None:
        return compute()
    with OBSERVERS[-1].instead_of(found):
        return compute() if is_real(like) else empty()
