"""Names the kernels in C++, which are no operators of torch, for its profiler."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd.profiler import record_function

_NOTHING = nullcontext()


def named(name: str) -> AbstractContextManager[object]:
    """A context in which a profile counts a kernel of this name; without a profile it does nothing.

    torch's own, always entered, took some 40 us a call between large operations.
    """
    return record_function(f"roundtable::{name}") if is_profiled() else _NOTHING


def is_profiled() -> bool:
    """Whether one of torch's profilers runs. Builds of torch that do not tell count as profiled."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))
