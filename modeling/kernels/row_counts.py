"""How many rows an expert is computed over on a CPU in 16 bits.

oneDNN builds each product anew for each number of rows (768 take 0.2 ms, the first time 0.5 to 1.1) and keeps it (0.6
MB; AMD EPYC with AVX-512, 2026-11-25), and experts have other numbers of tokens in each step. So their rows are rounded
up to few numbers, and an expert's products are built for all that may come before the first of them is needed.
"""

import functools

import torch
from torch import Tensor

UNITS = 32  # as many multiples of the unit; for each doubling above, half as many
DOUBLINGS = 24


def rounded_up(counts_E: Tensor, unit: int) -> Tensor:
    """Each count at the next one of ``row_counts``, int64.

    Beyond UNITS units less than a 16th is added: an expert that takes far more tokens than others adds few numbers.
    """
    bounds = UNITS * unit << torch.arange(DOUBLINGS, device=counts_E.device)
    units_E = unit << (counts_E[:, None] > bounds).sum(1)
    return (counts_E + units_E - 1) // units_E * units_E


@functools.lru_cache(maxsize=1000)
def row_counts(unit: int, least: int, most: int) -> tuple[int, ...]:
    """All numbers of rows up to ``least``, and on until the unit doubles: but none that more than ``most`` need.

    Ascending, without 0. So what is there for ``least`` rows is there for somewhat more of them.
    """
    found, rows, step = [], 0, unit
    while rows < least or rows % (UNITS * step):
        if rows == UNITS * step:
            step *= 2
        if rows >= most:
            break
        rows += step
        found.append(rows)
    return tuple(found)
