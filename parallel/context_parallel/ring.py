"""Ring attention (Liu et al. 2023, arXiv:2310.01889) over zig-zag chunks: keys and values travel, queries stay.

A block is computed in one of two ways: by pieces of documents with FlashAttention, on CUDA in half precision, or by
tiles with masks. Tiles support all terms that scores may have, and are the reference for pieces.

Shape letters: B batch, S positions held, T all rows' positions held (B * S), H heads, G key-value heads, C d_head; 2 in
front: keys and values.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.context import Context
from modeling.kernels.blocks import attend_block, attend_block_backward, attend_scored_backward
from modeling.kernels.sinks import join_sinks, sinks_gradient
from modeling.kernels.varlen import FLASH, PiecesKernel, fits_flash, fits_pieces
from modeling.kernels.widths import widened
from modeling.score_terms import NO_TERMS, ScoreTerms, bucket_sums
from parallel.context_parallel.context import HeldContext
from parallel.context_parallel.pieces import PieceCall, PiecePlan
from parallel.context_parallel.plan import TILE, RingPlan, Tile, plan_ring
from parallel.mesh import Axis

KEYS, GRADIENTS = 0, 1  # tags of the two kinds of messages; both may be under way at once


class Work(NamedTuple):
    """What this rank computes, by the cp rank that holds the keys: either tiles or kernel calls by pieces."""

    tiles: RingPlan | None = None
    calls: PiecePlan | None = None
    kernel: PiecesKernel = FLASH

    def of(self, key_rank: int) -> tuple[Sequence[Tile], Sequence[PieceCall]]:
        """The tiles and the calls for the keys of ``key_rank``; one of the two is empty."""
        return (self.tiles[key_rank] if self.tiles else (), self.calls[key_rank] if self.calls else ())


def ring_attend(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    context: Context,
    window: int | None,
    terms: ScoreTerms = NO_TERMS,
    *,
    axis: Axis,
    tile: int = TILE,
    kernel: PiecesKernel | None = None,
) -> Tensor:
    """Attention's output (B, S, H, C) at the held positions. All ranks of ``axis`` call it.

    Before and after, each rank holds all heads at its own positions; blocks of keys and values pass by, one at a time,
    so memory grows with S, not with cp * S. Outputs and gradients are summed in fp32 in every dtype.

    ``kernel``: computes pieces of documents, where it supports the scores' terms; None: FlashAttention where it can.
    Everything else is computed by tiles of at most ``tile`` queries and keys.

    Bytes sent by each rank, E bytes an element: (cp - 1) * 2 * B * S * G * C * E forward, in cp - 1 messages, and
    (cp - 1) * 2 * B * S * G * C * (E + 4) backward, in cp - 1 of keys and values and cp - 1 of their gradients in fp32.

    Values may have fewer channels than keys; they are padded with zeros, since both are sent in one tensor.
    """
    assert isinstance(context, HeldContext)
    n_channels = v_BSGC.shape[-1]
    v_BSGC = widened(v_BSGC, k_BSGC.shape[-1])
    if not fits_pieces(terms):
        kernel = None
    elif kernel is None and fits_flash(q_BSHC):
        kernel = FLASH
    if kernel is not None:
        work = Work(calls=context.pieces(window, axis), kernel=kernel)
    else:
        if window not in context.plans:
            context.plans[window] = plan_ring(context.whole, window, axis, tile)
        work = Work(tiles=context.plans[window])
    told = terms._replace(sinks_H=None, bias_HN=None)
    out_BSHC = _RingAttention.apply(q_BSHC, k_BSGC, v_BSGC, terms.sinks_H, terms.bias_HN, work, axis, told)
    return out_BSHC[..., :n_channels]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHC: Tensor,
        k_BSGC: Tensor,
        v_BSGC: Tensor,
        sinks_H: Tensor | None,
        bias_HN: Tensor | None,
        work: Work,
        axis: Axis,
        terms: ScoreTerms,
    ) -> Tensor:
        terms = terms._replace(sinks_H=sinks_H, bias_HN=bias_HN)
        out_BSHC, lse_BHS = ring_forward(q_BSHC, torch.stack([k_BSGC, v_BSGC]), work, axis, terms)
        out_BSHC = out_BSHC.to(q_BSHC.dtype)
        ctx.save_for_backward(q_BSHC, k_BSGC, v_BSGC, sinks_H, bias_HN, out_BSHC, lse_BHS)
        ctx.work, ctx.axis, ctx.terms = work, axis, terms._replace(sinks_H=None, bias_HN=None)
        return out_BSHC

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_BSHC: Tensor
    ) -> tuple[Tensor | None, ...]:
        q_BSHC, k_BSGC, v_BSGC, sinks_H, bias_HN, out_BSHC, lse_BHS = ctx.saved_tensors
        terms = ctx.terms._replace(sinks_H=sinks_H, bias_HN=bias_HN)
        kv_2BSGC = torch.stack([k_BSGC, v_BSGC])
        dq_BSHC, dkv_2BSGC, dbias_HN = ring_backward(
            grad_BSHC.contiguous(), q_BSHC, kv_2BSGC, out_BSHC, lse_BHS, ctx.work, ctx.axis, terms
        )
        dk_BSGC, dv_BSGC = dkv_2BSGC.to(k_BSGC.dtype)
        dsinks_H = None if sinks_H is None else sinks_gradient(grad_BSHC, out_BSHC, lse_BHS, sinks_H)
        return dq_BSHC.to(q_BSHC.dtype), dk_BSGC, dv_BSGC, dsinks_H, dbias_HN, None, None, None


def ring_forward(q_BSHC: Tensor, kv_2BSGC: Tensor, work: Work, axis: Axis, terms: ScoreTerms) -> tuple[Tensor, Tensor]:
    """Attention's output (B, S, H, C) and log-sum-exp (B, H, S) at the held positions, in fp32.

    All ranks of ``axis`` call it. At step n this rank works on the keys of rank - n, while the next block arrives.
    Attention sinks are added once, at the end, when a rank's queries have met all their keys.

    The log-sum-exp, one number for C numbers of the output, is summed in fp64: its rounding is a relative error of the
    weights, and after 256 merges fp32 was off by 2.6e-6, fp64 (rounded at the end) by 2.7e-7 (CPU, 2026-11-21).
    """
    batch, held, n_heads, _ = q_BSHC.shape
    out_BSHC = q_BSHC.new_zeros(q_BSHC.shape, dtype=torch.float32)
    lse_HBS = q_BSHC.new_full((n_heads, batch, held), float("-inf"), dtype=torch.float64)  # as FlashAttention has it
    lse_BHS = lse_HBS.transpose(0, 1)
    for step in range(axis.degree):
        is_last = step == axis.degree - 1
        receive = None if is_last else pass_on(kv_2BSGC, axis, KEYS)
        k_BSGC, v_BSGC = kv_2BSGC
        tiles, calls = work.of((axis.rank - step) % axis.degree)
        for tile in tiles:
            queries, keys = tile.queries, tile.keys
            seen = (k_BSGC[:, keys], v_BSGC[:, keys], tile.mask(terms), terms.cap, tile.factors(terms))
            block = attend_block(q_BSHC[:, queries], *seen)
            merge(out_BSHC[:, queries], lse_BHS[:, :, queries], *block)
        for number, call in enumerate(calls):
            heads = (q_BSHC, k_BSGC, v_BSGC)
            attend_pieces(*heads, out_BSHC, lse_HBS, call, work.kernel, is_first=step == number == 0)
        if receive is not None:
            kv_2BSGC = receive()
    if terms.sinks_H is not None:
        out_BSHC, lse_BHS = join_sinks(out_BSHC, lse_BHS, terms.sinks_H)
    return out_BSHC, lse_BHS.float()


def merge(out_BQHC: Tensor, lse_BHQ: Tensor, block_BQHC: Tensor, block_lse_BHQ: Tensor) -> None:
    """Adds one block's attention to ``out_BQHC`` (fp32) and ``lse_BHQ`` (fp64) in place.

    With weights exp(lse) on both sides, the new block's share is a sigmoid of their difference. The block's lse may be
    -inf (no key seen) where the sum so far is finite, or the other way round, but not both: each query's own key is in
    the first block, and is always seen.
    """
    share_BHQ = torch.sigmoid(block_lse_BHQ - lse_BHQ)
    out_BQHC.lerp_(block_BQHC.float(), share_BHQ.float().transpose(1, 2)[..., None])
    lse_BHQ.copy_(torch.logaddexp(lse_BHQ, block_lse_BHQ.to(lse_BHQ.dtype)))


def attend_pieces(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    out_BSHC: Tensor,
    lse_HBS: Tensor,
    call: PieceCall,
    kernel: PiecesKernel,
    *,
    is_first: bool,
) -> None:
    """Merges one call's attention into ``out_BSHC`` (fp32) and ``lse_HBS`` (fp64), both contiguous, in place.

    ``is_first``: the call is that of all queries with themselves, whose result is copied, as there is none yet to
    merge.
    """
    q_THC, k_TGC, v_TGC = rows_of(q_BSHC, call.queries), rows_of(k_BSGC, call.keys), rows_of(v_BSGC, call.keys)
    block_THC, block_lse_HT = kernel.forward(q_THC, k_TGC, v_TGC, call.pieces)
    out_THC, lse_HT = out_BSHC.view(-1, *out_BSHC.shape[2:]), lse_HBS.view(len(lse_HBS), -1)
    if is_first:
        out_THC.copy_(block_THC)
        lse_HT.copy_(block_lse_HT)
        return
    sizes = [each.stop - each.start for each in call.queries]
    parts = zip(call.queries, block_THC.split(sizes), block_lse_HT.split(sizes, dim=1), strict=True)
    for places, part_THC, part_lse_HT in parts:
        merge(out_THC[None, places], lse_HT[None, :, places], part_THC[None], part_lse_HT[None])


def rows_of(heads_BSHC: Tensor, places: Sequence[slice]) -> Tensor:
    """The heads (T, H, C) at these places of all rows; a view where it is one slice of contiguous heads."""
    heads_THC = heads_BSHC.flatten(0, 1)
    return heads_THC[places[0]] if len(places) == 1 else torch.cat([heads_THC[each] for each in places])


def ring_backward(
    grad_BSHC: Tensor,
    q_BSHC: Tensor,
    kv_2BSGC: Tensor,
    out_BSHC: Tensor,
    lse_BHS: Tensor,
    work: Work,
    axis: Axis,
    terms: ScoreTerms,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients (dq_BSHC, dkv_2BSGC, dbias_HN) in fp32, of this rank's own queries, keys and values.

    ``dbias_HN``, where there is a bias, is this rank's queries' part of its gradient, which is complete when gradients
    are summed over cp. All ranks of ``axis`` call it. Keys and values travel around the ring again. A block's gradient
    starts at the first rank that the block visits, follows the block one step behind, grows at every rank, and ends at
    the rank that holds the block, which adds its own part.
    """
    dq_BSHC = q_BSHC.new_zeros(q_BSHC.shape, dtype=torch.float32)
    home_2BSGC = torch.zeros_like(kv_2BSGC, dtype=torch.float32)
    dbias_HN = None if terms.bias_HN is None else torch.zeros_like(terms.bias_HN, dtype=torch.float64)
    receive_gradient: Callable[[], Tensor] | None = None
    for step in range(axis.degree):
        is_last = step == axis.degree - 1
        receive = None if is_last else pass_on(kv_2BSGC, axis, KEYS)
        found_2BSGC = home_2BSGC if step == 0 else torch.zeros_like(home_2BSGC)
        k_BSGC, v_BSGC = kv_2BSGC
        tiles, calls = work.of((axis.rank - step) % axis.degree)
        for tile in tiles:
            queries, keys = tile.queries, tile.keys
            passed = (
                grad_BSHC[:, queries],
                q_BSHC[:, queries],
                k_BSGC[:, keys],
                v_BSGC[:, keys],
                out_BSHC[:, queries],
                lse_BHS[:, :, queries],
                tile.mask(terms),
            )
            if terms.needs_formula:
                scored = attend_scored_backward(*passed, terms.cap, tile.factors(terms))
                dq_BQHC, dk_BSGC, dv_BSGC, dscores_BHQS = scored
                if dbias_HN is not None:
                    dbias_HN += bucket_sums(dscores_BHQS, tile.buckets_BQS(terms), dbias_HN.shape[1])
            else:
                dq_BQHC, dk_BSGC, dv_BSGC = attend_block_backward(*passed)
            dq_BSHC[:, queries].add_(dq_BQHC)  # `+=` would copy the sum onto itself once more
            found_2BSGC[0, :, keys].add_(dk_BSGC)
            found_2BSGC[1, :, keys].add_(dv_BSGC)
        for call in calls:
            whole = (grad_BSHC, out_BSHC, lse_BHS.transpose(0, 1))
            attend_pieces_backward(*whole, q_BSHC, k_BSGC, v_BSGC, dq_BSHC, found_2BSGC, call, work.kernel)
        if step > 0:
            receive_gradient = send_gradient_on(found_2BSGC, receive_gradient, axis)
        if receive is not None:
            kv_2BSGC = receive()
    if receive_gradient is not None:
        home_2BSGC += receive_gradient()
    return dq_BSHC, home_2BSGC, None if dbias_HN is None else dbias_HN.float()


def attend_pieces_backward(
    grad_BSHC: Tensor,
    out_BSHC: Tensor,
    lse_HBS: Tensor,
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    dq_BSHC: Tensor,
    found_2BSGC: Tensor,
    call: PieceCall,
    kernel: PiecesKernel,
) -> None:
    """Adds one call's gradients to ``dq_BSHC`` and, of keys and values, to ``found_2BSGC``; both fp32, in place."""
    grad_THC, q_THC, out_THC = (rows_of(each, call.queries) for each in (grad_BSHC, q_BSHC, out_BSHC))
    k_TGC, v_TGC = rows_of(k_BSGC, call.keys), rows_of(v_BSGC, call.keys)
    lse_HT = torch.cat([lse_HBS.flatten(1)[:, each] for each in call.queries], dim=1)
    dq_THC, dk_TGC, dv_TGC = kernel.backward(grad_THC, q_THC, k_TGC, v_TGC, out_THC, lse_HT, call.pieces)
    add_rows(dq_BSHC, call.queries, dq_THC)
    add_rows(found_2BSGC[0], call.keys, dk_TGC)
    add_rows(found_2BSGC[1], call.keys, dv_TGC)


def add_rows(sum_BSHC: Tensor, places: Sequence[slice], found_THC: Tensor) -> None:
    """Adds ``found_THC`` to ``sum_BSHC``, in place, at these places among the positions of all rows."""
    sum_THC = sum_BSHC.view(-1, *sum_BSHC.shape[2:])
    for each, part_THC in zip(places, found_THC.split([each.stop - each.start for each in places]), strict=True):
        sum_THC[each].add_(part_THC)


def send_gradient_on(
    found_2BSGC: Tensor, receive_gradient: Callable[[], Tensor] | None, axis: Axis
) -> Callable[[], Tensor]:
    """Adds the previous ranks' gradient of the same block and sends the sum on to the next rank.

    ``receive_gradient`` waits for the previous ranks' sum; None at the first rank that a block visits. Returns the
    function that waits for the next block's sum. All ranks of ``axis`` call it.
    """
    if receive_gradient is not None:
        found_2BSGC += receive_gradient()
    return pass_on(found_2BSGC, axis, GRADIENTS)


def pass_on(tensor: Tensor, axis: Axis, tag: int) -> Callable[[], Tensor]:
    """Starts sending ``tensor`` (contiguous) to the next rank; returns a function that waits for the previous rank's.

    All ranks of ``axis`` call it, in the same order, with tensors of the same shape, and must not write into theirs
    until the wait is over. Each sends the tensor's bytes.
    """
    arriving = torch.empty_like(tensor)
    following, preceding = (axis.ranks[(axis.rank + step) % axis.degree] for step in (1, -1))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, following, group=axis.group, tag=tag),
            dist.P2POp(dist.irecv, arriving, preceding, group=axis.group, tag=tag),
        ]
    )

    def receive() -> Tensor:
        for work in works:
            work.wait()
        return arriving

    return receive
