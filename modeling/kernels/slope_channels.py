"""ALiBi's slopes as further channels of queries and keys, for attention kernels that have no slopes.

A score falls by ``slope * (i - j)`` from query i to key j. Adding the same number for all keys of a query changes no
weight of its softmax, so it is enough to add ``slope * j`` to each score, and that is a product of further channels of
queries and keys. Both factors are exact in 16 bits: a slope is a sum of three numbers, whose 8 bits of significand each
(bf16) make up fp32's 24, and a position is a sum of few digits. The kernels sum in fp32: over 8,192 tokens the steepest
slope (0.84) makes scores of about 7,000, which fp32 itself rounds by 5e-4.

Shape letters: B batch, S sequence, H heads, G key-value heads, C channels, N further ones, D digits, P parts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from modeling.kernels.widths import FLASH_CHANNELS, FLASH_UNIT, widened
from modeling.score_terms import Alibi

BASE = 256  # of a position's digits: whole numbers up to it are exact in bf16 and fp16
PARTS = 3  # numbers that a slope is the sum of
# Digits that a position may have: each, times its power of BASE, must be within the dtype's range.
MOST_DIGITS = {torch.bfloat16: 3, torch.float16: 2}


def fits_slopes(q_BSHC: Tensor) -> bool:
    """Whether these queries and their keys can hold slopes: in 16 bits, neither too wide nor too long."""
    n_digits = digits_of(q_BSHC.shape[1])
    return n_digits <= MOST_DIGITS.get(q_BSHC.dtype, 0) and q_BSHC.shape[-1] + PARTS * n_digits <= FLASH_CHANNELS


def with_slopes(q_BSHC: Tensor, k_BSGC: Tensor, channels: "SlopeChannels") -> tuple[Tensor, Tensor]:
    """Queries and keys with the further channels, whose products include the slopes, in their own dtypes.

    The products are to be scaled by the factor for the queries' width before the channels were added.
    """
    of_queries = channels.of_queries_HN.expand(*q_BSHC.shape[:2], -1, -1)
    of_keys = channels.of_keys_BSN[:, :, None].expand(-1, -1, k_BSGC.shape[2], -1)
    return torch.cat([q_BSHC, of_queries], dim=-1), torch.cat([k_BSGC, of_keys], dim=-1)


class SlopeChannels(NamedTuple):
    """The further channels of queries and keys, which fill up the heads to whole ``FLASH_UNIT``s."""

    of_queries_HN: Tensor
    of_keys_BSN: Tensor

    @classmethod
    def of(cls, alibi: Alibi, positions_BS: Tensor, n_channels: int, dtype: torch.dtype) -> "SlopeChannels":
        """The channels for heads of ``n_channels``.

        ``positions_BS`` (below S) are places in the document or in the row.
        """
        n_digits, slopes_H = digits_of(positions_BS.shape[1]), alibi.slopes(positions_BS.device)
        parts_HP = slope_parts(slopes_H * n_channels**0.5, dtype)
        powers = [BASE**power for power in range(n_digits)]
        digits_BSD = torch.stack([positions_BS // power % BASE * power for power in powers], dim=-1).to(dtype)
        n_further = PARTS * n_digits + -(n_channels + PARTS * n_digits) % FLASH_UNIT
        of_queries_HN, of_keys_BSN = parts_HP.repeat(1, n_digits), digits_BSD.repeat_interleave(PARTS, dim=-1)
        return cls(widened(of_queries_HN, n_further), widened(of_keys_BSN, n_further))


def digits_of(seq_len: int) -> int:
    """The number of digits of a place in a row of ``seq_len`` tokens."""
    n_digits = 1
    while BASE**n_digits < seq_len:
        n_digits += 1
    return n_digits


def slope_parts(slopes_H: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers (H, P) in ``dtype`` whose sums over P are the slopes (fp32)."""
    parts, rest_H = [], slopes_H
    for _ in range(PARTS):
        parts.append(rest_H.to(dtype))
        rest_H = rest_H - parts[-1].float()
    return torch.stack(parts, dim=-1)
