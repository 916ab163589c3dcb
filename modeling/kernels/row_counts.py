"""How many rows an expert's matrix products are computed over on a CPU in 16 bits.

oneDNN builds a product for each new number of rows (with 768 rows, a product takes 0.2 ms, the first time 0.5 to 1.1)
and keeps what it built (0.6 MB; AMD EPYC with AVX-512, 2026-11-25), and experts have other numbers of tokens in each
step. So their rows are rounded up to a few numbers, and all of an expert's products that a run may need are built
before the first of them is needed.
"""

import functools

import torch
from torch import Tensor

UNITS = 32  # the numbers of rows are this many multiples of the unit; then, for each doubling, half as many
DOUBLINGS = 24  # more than any number of rows needs


def rounded_up(counts_E: Tensor, unit: int) -> Tensor:
    """Each count rounded up to the next one of ``row_counts``, int64.

    Beyond UNITS units, rounding adds less than a 16th. Since units double there, an expert that takes far more tokens
    than others adds only a few numbers.
    """
    bounds = UNITS * unit << torch.arange(DOUBLINGS, device=counts_E.device)
    units_E = unit << (counts_E[:, None] > bounds).sum(1)
    return (counts_E + units_E - 1) // units_E * units_E


@functools.lru_cache(maxsize=1000)
def row_counts(unit: int, least: int, most: int) -> tuple[int, ...]:
    """All numbers of rows up to ``least`` and on until the unit doubles, but none above what ``most`` rows need.

    Ascending, without 0. Going on beyond ``least`` means that somewhat more rows need no new number.
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
