"""Attention piece by piece, with capped or biased scores, sinks, and dropout of weights; forward and backward.

Shape letters: B batch, Q queries, S keys, H heads, G key-value heads, C d_head, N buckets of distances.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from modeling.context import Context, attention_mask
from modeling.dropout import ScoreDropout
from modeling.kernels import attention_passes
from modeling.kernels.blocks import attend_block, attend_block_backward, attend_scored_backward
from modeling.kernels.scratch import SCRATCH
from modeling.kernels.sinks import join_sinks, sinks_gradient
from modeling.kernels.stand_ins import stand_in
from modeling.pieces import Piece
from modeling.score_terms import ScoreTerms, biased, bucket_sums


class Pairs(Protocol):
    """Gives the mask, and the buckets of distances, for the pairs of queries and keys of each piece."""

    def added(self, bias_HN: Tensor | None) -> Callable[[Piece], Tensor]:
        """A function from a piece to its mask, the bias added, as ``attend_block`` takes it."""
        ...

    def buckets_of(self, piece: Piece) -> Tensor:
        """The buckets of the distances between the piece's queries and keys, for a bias: int64 (B or 1, Q, K)."""
        ...


class Bands(NamedTuple):
    """The pairs of pieces of single documents: each takes a corner (``Piece.of_band``) of what is made for the longest.

    ``mask`` is what ``attend_block`` takes, or a bool mask together with ``buckets``, the buckets of its pairs'
    distances.
    """

    mask: Tensor
    buckets: Tensor | None = None

    def added(self, bias_HN: Tensor | None) -> Callable[[Piece], Tensor]:
        """A function from a piece to its corner of the mask, the bias added."""
        whole = self.mask
        if bias_HN is not None and self.buckets is not None:
            whole = biased(whole, bias_HN, self.buckets)
        return lambda piece: piece.of_band(whole)

    def buckets_of(self, piece: Piece) -> Tensor:
        """The piece's corner of the buckets."""
        assert self.buckets is not None
        return piece.of_band(self.buckets)


class Whole(NamedTuple):
    """The pairs of all queries and keys, of which each piece takes its part.

    ``mask`` is what ``attend_block`` takes, or a bool mask (B, Q, S) together with ``buckets``, the buckets of its
    pairs' distances.
    """

    mask: Tensor
    buckets: Tensor | None = None

    def added(self, bias_HN: Tensor | None) -> Callable[[Piece], Tensor]:
        """A function from a piece to its part of the mask, the bias added."""

        def of_piece(piece: Piece) -> Tensor:
            seen = self.mask[..., piece.queries, piece.keys]
            return seen if bias_HN is None else biased(seen, bias_HN, self.buckets_of(piece))

        return of_piece

    def buckets_of(self, piece: Piece) -> Tensor:
        """The piece's part of the buckets."""
        assert self.buckets is not None
        return self.buckets[..., piece.queries, piece.keys]


class RowPairs(NamedTuple):
    """The pairs of pieces of whole rows.

    Masks are made for one piece at a time: nothing is as large as a row's square.
    """

    context: Context
    window: int | None
    terms: ScoreTerms

    def added(self, bias_HN: Tensor | None) -> Callable[[Piece], Tensor]:
        """A function from a piece to its mask, with slopes or the bias if there are any."""

        def made(piece: Piece) -> Tensor:
            positions_BQ, positions_BK = self.of_piece(self.context.positions_BS, piece)
            of_queries, of_keys = self.of_piece(self.context.documents_BS, piece)
            mask_BQK = attention_mask(positions_BQ, of_queries, positions_BK, of_keys, self.window)
            if bias_HN is not None:
                return biased(mask_BQK, bias_HN, self.buckets_of(piece))
            return self.terms.mask(mask_BQK, positions_BQ, positions_BK)

        return made

    def buckets_of(self, piece: Piece) -> Tensor:
        """The buckets of the piece's distances."""
        buckets_BQK = self.terms.buckets_of(*self.of_piece(self.context.positions_BS, piece))
        assert buckets_BQK is not None
        return buckets_BQK

    @staticmethod
    def of_piece(each_BS: Tensor, piece: Piece) -> tuple[Tensor, Tensor]:
        """The values of ``each_BS`` at the piece's queries (B, Q) and at its keys (B, K)."""
        return each_BS[piece.rows, piece.queries], each_BS[piece.rows, piece.keys]


def term_attention(
    q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, pieces: Sequence[Piece], terms: ScoreTerms, pairs: Pairs
) -> Tensor:
    """Attention's output (B, Q, H, C) to the keys that ``pairs`` show, and to the sinks. Each query is in one piece.

    Values have as many channels as keys. Where weights are dropped, queries and keys are those of whole samples.

    On a CPU documents are computed in C++ (modeling.kernels.attention_passes), unless there are a cap, a bias that is
    trained, or dropout, or the dtype is fp16. All else is computed in fp32, whatever the dtype: in 16 bits torch's
    kernel took 1.4 times as long over packed documents (91 against 62 ms, 8 rows of 512 in 6 documents, without AMX,
    2026-11-23), since it prepares a product for each new shape.
    """
    assert terms.dropout is None or q_BQHC.shape[1] == k_BSGC.shape[1]
    tensors = (q_BQHC, k_BSGC, v_BSGC, terms.sinks_H, terms.bias_HN)
    return _PieceAttention.apply(*tensors, pairs, pieces, terms.cap, terms.dropout)


class _PieceAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BQHC: Tensor,
        k_BSGC: Tensor,
        v_BSGC: Tensor,
        sinks_H: Tensor | None,
        bias_HN: Tensor | None,
        pairs: Pairs,
        pieces: Sequence[Piece],
        cap: float | None,
        dropout: ScoreDropout | None,
    ) -> Tensor:
        added = pairs.added(bias_HN)
        is_plain = bias_HN is None and cap is None and dropout is None
        # masks of all pieces are there at once in C++: those of single documents are parts of one
        ctx.suits_cpp = is_plain and isinstance(pairs, Bands)
        in_cpp = ctx.suits_cpp and attention_passes.fits(q_BQHC, k_BSGC, v_BSGC)
        if in_cpp:
            out_BQHC, lse_BHQ = attention_passes.forward(q_BQHC, k_BSGC, v_BSGC, pieces, added, sinks_H)
        else:
            kernel = partial(attention_passes.kernel, "forward", q_BQHC, k_BSGC, v_BSGC, pieces)
            out_BQHC, lse_BHQ = stand_in(
                kernel if ctx.suits_cpp else None,
                q_BQHC,
                lambda: _forward_widely(q_BQHC, k_BSGC, v_BSGC, sinks_H, pieces, added, cap, dropout),
                lambda: (empty_like(q_BQHC), empty_like(q_BQHC[..., 0].transpose(1, 2), dtype=torch.float32)),
            )
        ctx.save_for_backward(q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ, sinks_H, bias_HN)
        ctx.pairs, ctx.pieces, ctx.cap, ctx.dropout = pairs, pieces, cap, dropout
        ctx.is_plain, ctx.in_cpp = is_plain, in_cpp
        return out_BQHC

    @staticmethod
    def backward(ctx: Any, grad_BQHC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # once: what is computed again is given out once
        q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ, sinks_H, bias_HN = saved
        dbias_HN = None
        if ctx.in_cpp:
            given = (grad_BQHC, q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ)
            grads = attention_passes.backward(*given, ctx.pieces, ctx.pairs.added(bias_HN))
        else:
            kernel = partial(attention_passes.kernel, "backward", q_BQHC, k_BSGC, v_BSGC, ctx.pieces)
            *grads, dbias_HN = stand_in(
                kernel if ctx.suits_cpp else None,
                q_BQHC,
                lambda: _backward_widely(ctx, saved, grad_BQHC),
                lambda: (empty_like(q_BQHC), empty_like(k_BSGC), empty_like(v_BSGC), None),
            )
        dsinks_H = None if sinks_H is None else sinks_gradient(grad_BQHC, out_BQHC, lse_BHQ, sinks_H)
        return *grads, dsinks_H, None if dbias_HN is None else dbias_HN.float(), *[None] * 4


def _forward_widely(
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    sinks_H: Tensor | None,
    pieces: Sequence[Piece],
    added: Callable[[Piece], Tensor],
    cap: float | None,
    dropout: ScoreDropout | None,
) -> tuple[Tensor, Tensor]:
    """The attention of all pieces and of the sinks, in its dtype, and the log of its normalizers in fp32."""
    out_BQHC, lse_BHQ = attend_widely(q_BQHC, k_BSGC, v_BSGC, pieces, added, cap, dropout)
    if sinks_H is not None:
        out_BQHC, lse_BHQ = join_sinks(out_BQHC, lse_BHQ, sinks_H)
    return out_BQHC.to(q_BQHC.dtype), lse_BHQ


def empty_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """New memory for a contiguous tensor of that shape, in its dtype or another."""
    return torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)


def _backward_widely(ctx: Any, saved: tuple[Any, ...], grad_BQHC: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by queries, keys and values, computed in fp32, and by the bias in fp64; None without one."""
    q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ, _, bias_HN = saved
    of_queries = [computed(grad_BQHC, "gradient"), computed(q_BQHC, "queries"), computed(out_BQHC, "out")]
    of_keys = [computed(k_BSGC, "keys"), computed(v_BSGC, "values")]
    dq_BQHC = room_for(q_BQHC, "by queries")
    dk_BSGC, dv_BSGC = room_for(k_BSGC, "by keys").zero_(), room_for(v_BSGC, "by values").zero_()
    dbias_HN = None if bias_HN is None else torch.zeros_like(bias_HN, dtype=torch.float64)
    added = ctx.pairs.added(bias_HN)
    for piece in ctx.pieces:
        rows, queries, keys = piece
        grad, q, out = (each[rows, queries] for each in of_queries)
        k, v = (each[rows, keys] for each in of_keys)
        passed = (grad, q, k, v, out, lse_BHQ[rows, :, queries])
        if ctx.is_plain:
            found = attend_block_backward(*passed, added(piece))
        else:
            factors = factors_of(ctx.dropout, piece, q_BQHC.device)  # drawn again
            *found, dscores = attend_scored_backward(*passed, added(piece), ctx.cap, factors)
            if dbias_HN is not None:
                buckets = ctx.pairs.buckets_of(piece).expand(dscores.shape[0], -1, -1)
                dbias_HN += bucket_sums(dscores, buckets, dbias_HN.shape[1])
        dq_BQHC[rows, queries] = found[0]
        dk_BSGC[rows, keys].add_(found[1])
        dv_BSGC[rows, keys].add_(found[2])
    return *(grad.to(q_BQHC.dtype) for grad in (dq_BQHC, dk_BSGC, dv_BSGC)), dbias_HN


def attend_widely(
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    pieces: Sequence[Piece],
    added: Callable[[Piece], Tensor],
    cap: float | None,
    dropout: ScoreDropout | None,
) -> tuple[Tensor, Tensor]:
    """The attention of all pieces and the log of its normalizers (B, H, Q), in fp32.

    The output may be scratch memory.
    """
    named = zip((q_BQHC, k_BSGC, v_BSGC), ("queries", "keys", "values"), strict=True)
    heads = [computed(each, name) for each, name in named]
    out_BQHC = room_for(q_BQHC, "out")
    lse_BHQ = out_BQHC.new_empty(out_BQHC.transpose(1, 2).shape[:-1])
    for piece in pieces:
        rows, queries, keys = piece
        q, k, v = (each[rows, part] for each, part in zip(heads, (queries, keys, keys), strict=True))
        found = attend_block(q, k, v, added(piece), cap, factors_of(dropout, piece, q.device))
        out_BQHC[rows, queries], lse_BHQ[rows, :, queries] = found
    return out_BQHC, lse_BHQ


def computed(heads: Tensor, name: str) -> Tensor:
    """Heads in the dtype in which they are computed with: on a CPU fp32.

    Those of 16 bits are copied into scratch memory that the next call with this name overwrites: pages of new memory
    would cost as much as the copy.
    """
    if not heads.is_cpu or heads.dtype == torch.float32:
        return heads
    return room_for(heads, name).copy_(heads)


def room_for(heads: Tensor, name: str) -> Tensor:
    """An fp32 tensor of the heads' shape, in new memory or in scratch.

    It is scratch on a CPU in 16 bits, where the result will be rounded into another tensor.
    """
    if heads.is_cpu and heads.dtype.itemsize == 2:
        return SCRATCH.take(f"attention: {name}", heads.shape, heads.new_empty((), dtype=torch.float32))
    return torch.empty_like(heads, dtype=torch.float32, memory_format=torch.contiguous_format)


def factors_of(dropout: ScoreDropout | None, piece: Piece, device: torch.device) -> Tensor | None:
    """Dropout's factors of the weights of the piece's pairs; None without dropout."""
    if dropout is None:
        return None
    of_rows = replace(dropout, seeds_B=dropout.seeds_B[piece.rows])
    places_Q = torch.arange(piece.queries.start, piece.queries.stop, device=device)
    return of_rows.factors(places_Q, piece.keys.start, piece.keys.stop - piece.keys.start)
