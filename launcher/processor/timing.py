"""How a rate is measured: the typical processor time of a call, on values that no cache holds."""

import time
from collections.abc import Callable, Iterator
from itertools import cycle
from statistics import median
from typing import TypeVar

import torch
from torch.utils._pytree import tree_leaves

SECONDS = 0.02  # the least processor time for which each measured call is repeated
LEAST_CALLS, MOST_CALLS = 3, 200
# Bytes that the measured operation moves, in the middle of each level's range (launcher.processor.ops.CACHED_BYTES).
MOVED = {"near": 128 << 10, "shared": 3 << 20, "memory": 48 << 20}
COLD_BYTES = 64 << 20  # more than caches hold
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def typical_seconds(work: Callable[[], object]) -> float:
    """The median processor time of a call in seconds, after a first one that warms up.

    Other work on the machine affects processor time less than wall time.
    """
    work()
    found, began = [], time.process_time()
    while len(found) < LEAST_CALLS or (time.process_time() - began < SECONDS and len(found) < MOST_CALLS):
        before = time.process_time()
        work()
        found.append(time.process_time() - before)
    return median(found)


Made = TypeVar("Made")


def one_after_another(make: Callable[[], Made]) -> Iterator[Made]:
    """An endless cycle through results of ``make``, so many that no cache holds one any more when it comes again.

    A step likewise reads hundreds of megabytes before it uses the same weights again.
    """
    first = make()
    size = sum(each.nbytes for each in tree_leaves(first) if isinstance(each, torch.Tensor))
    return cycle([first, *(make() for _ in range(min(MOST_CALLS, COLD_BYTES // size)))])
