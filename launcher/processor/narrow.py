"""Products of 16 bits on this processor: one that has no instructions for them multiplies number by number."""

import time
from typing import Literal

SLOW = 3.0  # times; 66 to 109 were seen on an AMD EPYC without products of its own for bf16 (one thread, 2026-11-22)


def narrow_cost(precision: Literal["bf16", "fp16"] = "bf16", rounds: int = 10) -> float:
    """How many times as long as in fp32 a matrix product takes in that precision: the least of ``rounds`` each.

    In turn, since what else runs here may hold up all of one kind.
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
