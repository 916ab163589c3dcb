"""Attention of pieces of documents to pieces of one block of keys, and its gradients: FlashAttention, or the formula.

Ring attention computes this for each block of keys that passes by, all pieces in one call. Shape letters: T the queries
of all pieces, U the keys of all pieces, N pieces, Q queries and K keys of one piece, H heads, G key-value heads, C
d_head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from modeling.kernels.blocks import attend_plain, attend_plain_backward
from modeling.kernels.widths import FLASH_CHANNELS, FLASH_UNIT, widened
from modeling.score_terms import ScoreTerms

NO_LIMIT = -1


@dataclass(frozen=True)
class Pieces:
    """The pieces' boundaries among queries and among keys, each laid out one piece after another; and what queries see.

    In a piece of Q queries and K keys, query i sees key j where ``i + K - Q - left <= j <= i + K - Q + right``: as in
    FlashAttention, limits count from the diagonal that ends at the last query and the last key. ``left`` and ``right``
    are at least 0, or NO_LIMIT. Every piece has queries and keys, and each query sees a key: kernels differ in what
    they return for a query without keys (its log-sum-exp is +inf in FlashAttention 2, -inf in 3 and 4).
    """

    query_bounds: Tensor  # int32 (N + 1), from 0 to T
    key_bounds: Tensor  # int32 (N + 1), from 0 to U
    longest_queries: int  # of one piece
    longest_keys: int
    left: int = NO_LIMIT
    right: int = NO_LIMIT  # 0 among a document's own tokens; NO_LIMIT where all keys lie before all queries


class PiecesKernel(NamedTuple):
    """One implementation's forward and backward pass. Results have the inputs' dtype (FlashAttention) or fp32.

    ``forward(q_THC, k_UGC, v_UGC, pieces)`` returns (out_THC, lse_HT): each query's attention to the keys of its piece
    alone, and the log of its normalizer (fp32).

    ``backward(grad_THC, q_THC, k_UGC, v_UGC, out_THC, lse_HT, pieces)`` returns these pieces' contributions to (dq_THC,
    dk_UGC, dv_UGC). ``out_THC`` (the queries' dtype) and ``lse_HT`` (fp32) are those of the queries' attention to all
    their keys, not of the pieces: exp(score - lse) is then the true weight of a key (FlashAttention-2,
    arXiv:2307.08691, section 3.1).
    """

    forward: Callable[[Tensor, Tensor, Tensor, Pieces], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Pieces], tuple[Tensor, Tensor, Tensor]]


def fits_pieces(terms: ScoreTerms) -> bool:
    """Whether these kernels can compute all that ``terms`` does to the scores.

    Sinks are allowed: they are added once a query has met all its keys, and the backward pass takes them in through the
    log-sum-exp.
    """
    return terms.alibi is None and not terms.needs_formula


def fits_flash(q: Tensor) -> bool:
    """Whether FlashAttention takes these heads: on CUDA, in half precision, of at most FLASH_CHANNELS channels."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= FLASH_CHANNELS


def flash_forward(q_THC: Tensor, k_UGC: Tensor, v_UGC: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """The forward pass by FlashAttention (CUDA, bf16 or fp16).

    It calls the operator below torch's own ``varlen_attn``, to get the log-sum-exp. Heads are filled up with zeros to
    whole units of FLASH_UNIT channels, which changes no score.
    """
    n_channels, scale = v_UGC.shape[-1], q_THC.shape[-1] ** -0.5
    q_THC, k_UGC, v_UGC = (_in_units(heads) for heads in (q_THC, k_UGC, v_UGC))
    longest_queries, longest_keys = flash_lengths(pieces)
    out_THC, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THC,
        k_UGC,
        v_UGC,
        pieces.query_bounds,
        pieces.key_bounds,
        longest_queries,
        longest_keys,
        0.0,
        _is_causal(pieces),
        False,
        scale=scale,
        window_size_left=pieces.left,
        window_size_right=pieces.right,
    )
    assert lse_HT.shape == (q_THC.shape[1], q_THC.shape[0])
    return out_THC[..., :n_channels], lse_HT


def flash_backward(
    grad_THC: Tensor, q_THC: Tensor, k_UGC: Tensor, v_UGC: Tensor, out_THC: Tensor, lse_HT: Tensor, pieces: Pieces
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass by FlashAttention's operator, which reads ``lse_HT`` as it lies in memory.

    Without dropout it reads neither the random state nor the argument after it: these have the shapes that torch's own
    ``varlen_attn`` gives them, and no values.
    """
    n_channels, scale = q_THC.shape[-1], q_THC.shape[-1] ** -0.5
    grad_THC, q_THC, k_UGC, v_UGC, out_THC = (_in_units(each) for each in (grad_THC, q_THC, k_UGC, v_UGC, out_THC))
    longest_queries, longest_keys = flash_lengths(pieces)
    rng_state = torch.empty(2, dtype=torch.uint64, device=q_THC.device)
    unused = torch.empty(0, device=q_THC.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad_THC,
        q_THC,
        k_UGC,
        v_UGC,
        out_THC,
        lse_HT.contiguous(),
        pieces.query_bounds,
        pieces.key_bounds,
        longest_queries,
        longest_keys,
        0.0,
        _is_causal(pieces),
        rng_state,
        unused,
        scale=scale,
        window_size_left=pieces.left,
        window_size_right=pieces.right,
    )
    dq_THC, dk_UGC, dv_UGC = (grad[..., :n_channels] for grad in grads)
    return dq_THC, dk_UGC, dv_UGC


def flash_lengths(pieces: Pieces) -> tuple[int, int]:
    """(longest queries, longest keys) as given to the operators; they may be larger than in any piece.

    With one query as the longest, FlashAttention 2 lays out grouped heads differently (``seqlenq_ngroups_swapped``), so
    at least two are given. And where the left is limited and the right is not, it takes the longest keys as the limit
    on the right, which would hide keys from the first queries of a piece that has more queries than any has keys.
    """
    longest_queries = max(2, pieces.longest_queries)
    is_open_on_the_right = pieces.left >= 0 and pieces.right < 0
    return longest_queries, max(pieces.longest_keys, longest_queries if is_open_on_the_right else 0)


def _is_causal(pieces: Pieces) -> bool:
    """The operators' flag for causal attention.

    As in torch's ``varlen_attn``, with a limited left the limits alone say it.
    """
    return pieces.left < 0 and pieces.right == 0


def _in_units(heads: Tensor) -> Tensor:
    return widened(heads, -(-heads.shape[-1] // FLASH_UNIT) * FLASH_UNIT)


def plain_forward(q_THC: Tensor, k_UGC: Tensor, v_UGC: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """The forward pass by the formula in fp32, piece by piece, on any device: the reference. Waits for the device."""
    found = [
        attend_plain(q_THC[None, queries], k_UGC[None, keys], v_UGC[None, keys], mask_1QK)
        for queries, keys, mask_1QK in _each(pieces)
    ]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], dim=1)


def plain_backward(
    grad_THC: Tensor, q_THC: Tensor, k_UGC: Tensor, v_UGC: Tensor, out_THC: Tensor, lse_HT: Tensor, pieces: Pieces
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass by the formula in fp32, piece by piece, on any device. Waits for the device."""
    found = []
    for queries, keys, mask_1QK in _each(pieces):
        seen = (q_THC[None, queries], k_UGC[None, keys], v_UGC[None, keys])
        whole = (out_THC[None, queries], lse_HT[None, :, queries])
        found.append(attend_plain_backward(grad_THC[None, queries], *seen, *whole, mask_1QK))
    dq_THC, dk_UGC, dv_UGC = (torch.cat([each[0] for each in grads]) for grads in zip(*found, strict=True))
    return dq_THC, dk_UGC, dv_UGC


def _each(pieces: Pieces) -> Iterator[tuple[slice, slice, Tensor]]:
    """Each piece's queries and keys, and which keys each query sees: bool (1, Q, K)."""
    query_bounds, key_bounds = pieces.query_bounds.tolist(), pieces.key_bounds.tolist()
    device = pieces.query_bounds.device
    for queries, keys in zip(_slices(query_bounds), _slices(key_bounds), strict=True):
        n_queries, n_keys = queries.stop - queries.start, keys.stop - keys.start
        diagonal_Q1 = torch.arange(n_queries, device=device)[:, None] + n_keys - n_queries
        right_of_it_QK = torch.arange(n_keys, device=device) - diagonal_Q1
        mask_QK = torch.ones_like(right_of_it_QK, dtype=torch.bool)
        if pieces.left >= 0:
            mask_QK &= right_of_it_QK >= -pieces.left
        if pieces.right >= 0:
            mask_QK &= right_of_it_QK <= pieces.right
        yield queries, keys, mask_QK[None]


def _slices(bounds: list[int]) -> Iterator[slice]:
    return (slice(start, stop) for start, stop in pairwise(bounds))


FLASH = PiecesKernel(flash_forward, flash_backward)
PLAIN = PiecesKernel(plain_forward, plain_backward)
