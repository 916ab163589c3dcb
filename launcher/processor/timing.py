"""How a rate is measured: the typical processor time of a call, on values that no cache holds."""

import time
from collections import deque
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
RECENT_BYTES = 16 << 20  # of what is made in a step until an operand is used, or memory taken anew: caches hold part
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def typical_seconds(work: Callable[[], object]) -> float:
    """The median processor time of a call in seconds, after a first one that warms up.

    Other work on the machine affects processor time less than wall time. Tensors that ``work`` returns are kept for a
    while, since those of a step are, too: were each freed at once, the next would be written to where a core's own
    cache still holds its memory.
    """
    kept = deque([work()])
    most = RECENT_BYTES // max(1, bytes_in(kept[0]))
    found, began = [], time.process_time()
    while len(found) < LEAST_CALLS or (time.process_time() - began < SECONDS and len(found) < MOST_CALLS):
        before = time.process_time()
        made = work()
        found.append(time.process_time() - before)
        kept.append(made)
        if len(kept) > most:
            kept.popleft()
    return median(found)


def bytes_in(made: object) -> int:
    """The bytes of all tensors in it."""
    return sum(each.nbytes for each in tree_leaves(made) if isinstance(each, torch.Tensor))


Made = TypeVar("Made")


def one_after_another(make: Callable[[], Made], n_bytes: int = COLD_BYTES) -> Iterator[Made]:
    """An endless cycle through results of ``make`` of ``n_bytes`` in all, by default so many that no cache holds them.

    A step likewise reads hundreds of megabytes before it uses the same weights again.
    """
    first = make()
    return cycle([first, *(make() for _ in range(min(MOST_CALLS, n_bytes // bytes_in(first))))])
