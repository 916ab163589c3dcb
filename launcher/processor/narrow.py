"""Measures how slow 16-bit matrix products are on this CPU: without instructions for them they are very slow."""

import time
from typing import Literal

# Above this many times the time in fp32, 16-bit products count as slow. 66 to 109 times were seen on an AMD EPYC
# without instructions for bf16 (one thread, 2026-11-22).
SLOW = 3.0


def narrow_cost(precision: Literal["bf16", "fp16"] = "bf16", rounds: int = 10) -> float:
    """How many times as long as in fp32 a matrix product takes in that precision, by the least of ``rounds`` each.

    The two alternate, since other work on the machine might slow down all products of one kind.
    """
    import torch

    kinds = ({"bf16": torch.bfloat16, "fp16": torch.float16}[precision], torch.float32)
    factors = {dtype: (torch.ones(512, 256, dtype=dtype), torch.ones(256, 512, dtype=dtype)) for dtype in kinds}
    taken: dict[torch.dtype, list[float]] = {dtype: [] for dtype in kinds}
    for _ in range(rounds):
        for dtype, (left, right) in factors.items():
            started = time.monotonic()
            torch.mm(left, right)
            taken[dtype].append(time.monotonic() - started)
    narrow, wide = (min(taken[dtype]) for dtype in kinds)
    return narrow / wide
