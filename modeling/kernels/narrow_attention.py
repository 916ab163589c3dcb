"""Attention's forward pass in 16 bits on a CPU with matrix units (AMX), piece by piece as in modeling.kernels.terms.

On such a processor torch's flash kernel uses oneDNN's products, which are built anew for each number of queries and
keys. So pieces are filled up to whole units of both, with neighbouring tokens of the row that are masked out. For 8
rows of 512 tokens and 6 heads of 64 channels, a pass takes 9.4 ms in packed documents and 11.9 in whole rows, where
fp32 takes 20 and 28 (one thread, Intel Xeon with AMX, 2026-11-29). Gradients are left in fp32, since their products are
too small to gain: 74 ms to 69.

Shape letters: B batch, S sequence, Q queries, K keys, H heads, G key-value heads, C d_head.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modeling.kernels.blocks import attend_block
from modeling.kernels.scratch import is_real
from modeling.pieces import Piece

QUERY_UNIT = 64  # with fewer queries the kernel does not use matrix units
KEY_UNIT = 128


def fits_narrow(q_BSHC: Tensor, k_BSGC: Tensor) -> bool:
    """Whether ``attend_narrowly`` takes these tensors and is faster: whole sequences of bf16, on such a processor."""
    is_narrow = q_BSHC.is_cpu and q_BSHC.dtype == k_BSGC.dtype == torch.bfloat16
    return is_narrow and q_BSHC.shape[1] == k_BSGC.shape[1] and is_real(q_BSHC) and has_matrix_units()


@functools.cache
def has_matrix_units() -> bool:
    """Whether this processor multiplies tiles of bf16."""
    return torch.cpu._is_amx_tile_supported()


def attend_narrowly(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, pieces: Sequence[Piece], added: Callable[[Piece], Tensor]
) -> tuple[Tensor, Tensor]:
    """The attention (B, S, H, C) of all pieces, in their dtype, and the log of its normalizers (B, H, S) in fp32.

    ``added(piece)`` is the piece's mask for ``attend_block``; each query is in one piece. Scores and weights are summed
    in fp32, and weights are rounded to 16 bits before they multiply values, as FlashAttention does on a GPU.
    """
    out_BSHC, seq_len = torch.empty_like(q_BSHC, memory_format=torch.contiguous_format), q_BSHC.shape[1]
    lse_BHS = q_BSHC.new_empty((len(q_BSHC), q_BSHC.shape[2], seq_len), dtype=torch.float32)
    for piece in pieces:
        queries, keys = whole_units(piece.queries, QUERY_UNIT, seq_len), whole_units(piece.keys, KEY_UNIT, seq_len)
        wide = Piece(piece.rows, queries, keys)
        mask = added(piece)
        if wide != piece:
            mask = filled_up(mask, piece, wide)
        found = attend_block(q_BSHC[piece.rows, queries], k_BSGC[piece.rows, keys], v_BSGC[piece.rows, keys], mask)
        inner = within(piece.queries, queries)
        out_BSHC[piece.rows, piece.queries] = found[0][:, inner]
        lse_BHS[piece.rows, :, piece.queries] = found[1][..., inner]
    return out_BSHC, lse_BHS


def whole_units(places: slice, unit: int, n: int) -> slice:
    """The places of a row of length ``n``, extended to whole units by those before them, then by those after them.

    It is the whole row if that is shorter than these units.
    """
    wanted = min(-(-(places.stop - places.start) // unit) * unit, n)
    start = max(0, places.stop - wanted)
    return slice(start, start + wanted)


def within(inner: slice, outer: slice) -> slice:
    """The slice ``inner`` as places within the slice ``outer``."""
    return slice(inner.start - outer.start, inner.stop - outer.start)


def filled_up(mask: Tensor, piece: Piece, wide: Piece) -> Tensor:
    """A piece's mask (..., Q, K) extended to the wide piece: added queries see no key, and added keys are hidden."""
    n_queries, n_keys = (each.stop - each.start for each in (wide.queries, wide.keys))
    nobody = False if mask.dtype == torch.bool else float("-inf")
    filled = mask.new_full((*mask.shape[:-2], n_queries, n_keys), nobody)
    filled[..., within(piece.queries, wide.queries), within(piece.keys, wide.keys)] = mask
    return filled
