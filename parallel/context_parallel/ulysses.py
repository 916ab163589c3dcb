"""DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all-to-alls from parts of positions to parts of heads.

Shape letters: B batch, S positions held, N all positions (cp * S), P cp ranks, H heads, G key-value heads, C channels
of a head's query and key, W of its value; h and g what one rank has of H and G during attention, X all its numbers.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.context import Context
from modeling.kernels.attention import attend
from modeling.pieces import QUERY_BLOCK
from modeling.score_terms import NO_TERMS, ScoreTerms
from parallel.context_parallel.context import HeldContext
from parallel.context_parallel.part import natural_order, rank_major_order
from parallel.mesh import Axis


def ulysses_attend(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGW: Tensor,
    context: Context,
    window: int | None,
    terms: ScoreTerms = NO_TERMS,
    *,
    axis: Axis,
    block: int = QUERY_BLOCK,
) -> Tensor:
    """Attention's output (B, S, H, W) at the held positions. All ranks of ``axis`` call it.

    Before and after, each rank holds all heads at its own positions; in between, h = H / cp heads and their g key-value
    heads at all positions in natural order, on which ``modeling``'s own attention runs. cp divides H, and it divides G
    or is a multiple of G; in the latter case each key-value head goes to the cp / G ranks that need it, and g is 1.

    Bytes sent by each rank, E bytes an element: B * S * (H + max(G, cp)) * (C + W) * E * (cp - 1) / cp forward,
    in two all-to-alls, and as many backward.
    """
    assert isinstance(context, HeldContext)
    n_heads, n_kv_heads, cp = q_BSHC.shape[2], k_BSGC.shape[2], axis.degree
    assert n_heads % cp == 0 and (n_kv_heads % cp == 0 or cp % n_kv_heads == 0), (n_heads, n_kv_heads, cp)
    if n_kv_heads < cp:
        k_BSGC, v_BSGW = (heads.repeat_interleave(cp // n_kv_heads, dim=2) for heads in (k_BSGC, v_BSGW))
    parts = [heads.unflatten(2, (cp, -1)) for heads in (q_BSHC, k_BSGC, v_BSGW)]
    shapes = [part.shape[3:] for part in parts]
    arrived_BNX = positions_to_heads(torch.cat([part.flatten(3) for part in parts], dim=3), axis)
    numbers = arrived_BNX.split([shape.numel() for shape in shapes], dim=2)
    q_BNhC, k_BNgC, v_BNgW = (part.unflatten(2, shape) for part, shape in zip(numbers, shapes, strict=True))
    own = own_terms(terms, axis)
    return heads_to_positions(attend(q_BNhC, k_BNgC, v_BNgW, context.whole, window, own, block=block), axis)


def own_terms(terms: ScoreTerms, axis: Axis) -> ScoreTerms:
    """The score terms of the heads that this rank has during attention. No communication.

    Each rank computes the terms' gradients for its own heads, at all positions; they become complete when gradients
    are summed over cp.
    """
    alibi = None if terms.alibi is None else terms.alibi.of_part(axis.rank, axis.degree)
    weights = (terms.sinks_H, terms.bias_HN)
    sinks_H, bias_HN = (None if weight is None else weight.chunk(axis.degree)[axis.rank] for weight in weights)
    dropout = None if terms.dropout is None else terms.dropout.of_part(axis.rank, axis.degree)
    return terms._replace(alibi=alibi, sinks_H=sinks_H, bias_HN=bias_HN, dropout=dropout)


def positions_to_heads(heads_BSPX: Tensor, axis: Axis) -> Tensor:
    """This rank's heads at all positions in natural order (B, N, X), from all heads at its own positions (B, S, P, X).

    Dim 2 of ``heads_BSPX`` is the rank that gets the heads. All ranks of ``axis`` call it; each sends (cp - 1) / cp of
    the tensor's bytes.
    """
    arrived_PBSX = exchange(heads_BSPX.movedim(2, 0), axis)
    rank_major_BNX = arrived_PBSX.movedim(0, 1).flatten(1, 2)
    return rank_major_BNX.index_select(1, natural_order(rank_major_BNX.shape[1], axis.degree, heads_BSPX.device))


def heads_to_positions(heads_BNhW: Tensor, axis: Axis) -> Tensor:
    """All heads at the held positions (B, S, P * h, W), from this rank's heads at all positions (B, N, h, W).

    The inverse of ``positions_to_heads``. All ranks of ``axis`` call it; each sends (cp - 1) / cp of the tensor's
    bytes.
    """
    rank_major_BNhW = heads_BNhW.index_select(1, rank_major_order(heads_BNhW.shape[1], axis.degree, heads_BNhW.device))
    arrived_PBShW = exchange(rank_major_BNhW.unflatten(1, (axis.degree, -1)).movedim(1, 0), axis)
    return arrived_PBShW.movedim(0, 2).flatten(2, 3)


def exchange(parts_P: Tensor, axis: Axis) -> Tensor:
    """An all-to-all of a tensor's rows: row p of the result is the row that rank p had for this rank.

    Before: ``parts_P`` has one row for each rank of ``axis``. All ranks call it with the same shape; each sends
    (cp - 1) / cp of the tensor's bytes. Differentiable: the gradient is exchanged in the same way.
    """
    return _Exchange.apply(parts_P, axis)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts_P: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_to_all(parts_P, axis)

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_to_all(grad_P, ctx.axis), None


def _all_to_all(parts_P: Tensor, axis: Axis) -> Tensor:
    parts_P = parts_P.contiguous()
    arrived_P = torch.empty_like(parts_P)
    dist.all_to_all_single(arrived_P, parts_P, group=axis.group)
    return arrived_P
