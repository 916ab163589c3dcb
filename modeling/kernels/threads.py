"""Work of kernels in C++ on a CPU, divided among as many threads as torch uses.

A call through ctypes releases Python's lock.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Part = TypeVar("Part")
Value = TypeVar("Value")
LEAST_NUMBERS = 1 << 17  # a thread that is given fewer costs more than it saves


def each_part(compute: Callable[[Part], Value], parts: Sequence[Part]) -> list[Value]:
    """The function's value for each part, computed in as many threads as torch uses where there are several parts."""
    each = map if len(parts) <= 1 else threads(os.getpid(), torch.get_num_threads()).map
    return [*each(compute, parts)]


def row_parts(n_rows: int, width: int, unit: int) -> list[tuple[int, int]]:
    """(first row, how many) of each thread's part of ``n_rows`` rows of ``width`` numbers, in whole units of rows."""
    n_threads = max(1, min(torch.get_num_threads(), n_rows * width // LEAST_NUMBERS))
    rows = -(-n_rows // (n_threads * unit)) * unit
    return [(first, min(rows, n_rows - first)) for first in range(0, n_rows, max(1, rows))]


@functools.cache
def threads(process: int, n_threads: int) -> ThreadPoolExecutor:
    """Threads of this process, kept from call to call, as their memory is. A process that was forked has its own."""
    return ThreadPoolExecutor(n_threads, thread_name_prefix="kernels")
