"""DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): from parts of positions to parts of heads and back.

Shape letters: B batch, S positions held, N all positions (cp * S), P cp ranks, H heads, G key-value heads, C d_head;
h and g what one rank has of H and G during attention.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.context import Context
from modeling.kernels.attention import attend
from parallel.context_parallel.context import HeldContext
from parallel.context_parallel.part import natural_order, rank_major_order
from parallel.mesh import Axis


def ulysses_attend(
    q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, context: Context, window: int | None, *, axis: Axis
) -> Tensor:
    """Attention's output (B, S, H, C) at the held positions. All ranks of ``axis`` call it.

    Before and after, each rank holds all heads at its own positions; in between, h = H / cp heads and their g key-value
    heads at all positions in natural order, on which ``modeling``'s own attention runs. cp divides H, and it divides G
    or is a multiple of G; in the latter case each key-value head goes to the cp / G ranks that need it, and g is 1.

    Bytes sent by each rank, E bytes an element: B * S * (2 * H + 2 * max(G, cp)) * C * E * (cp - 1) / cp forward, in
    two all-to-alls, and as many backward.
    """
    assert isinstance(context, HeldContext)
    n_heads, n_kv_heads, cp = q_BSHC.shape[2], k_BSGC.shape[2], axis.degree
    assert n_heads % cp == 0 and (n_kv_heads % cp == 0 or cp % n_kv_heads == 0), (n_heads, n_kv_heads, cp)
    if n_kv_heads < cp:
        k_BSGC, v_BSGC = (heads.repeat_interleave(cp // n_kv_heads, dim=2) for heads in (k_BSGC, v_BSGC))
    parts = [heads.unflatten(2, (cp, -1)) for heads in (q_BSHC, k_BSGC, v_BSGC)]
    heads = [part.shape[3] for part in parts]
    q_BNhC, k_BNgC, v_BNgC = positions_to_heads(torch.cat(parts, dim=3), axis).split(heads, dim=2)
    return heads_to_positions(attend(q_BNhC, k_BNgC, v_BNgC, context.whole, window), axis)


def positions_to_heads(heads_BSPhC: Tensor, axis: Axis) -> Tensor:
    """(B, N, h, C): this rank's heads at all positions, from every rank's heads (grouped by their ranks) at its own."""
    arrived_PBShC = exchange(heads_BSPhC.movedim(2, 0), axis)
    rank_major_BNhC = arrived_PBShC.movedim(0, 1).flatten(1, 2)
    return rank_major_BNhC.index_select(1, natural_order(rank_major_BNhC.shape[1], axis.degree, heads_BSPhC.device))


def heads_to_positions(heads_BNhC: Tensor, axis: Axis) -> Tensor:
    """(B, S, P * h, C): all heads at the held positions; the way back from ``positions_to_heads``."""
    rank_major_BNhC = heads_BNhC.index_select(1, rank_major_order(heads_BNhC.shape[1], axis.degree, heads_BNhC.device))
    arrived_PBShC = exchange(rank_major_BNhC.unflatten(1, (axis.degree, -1)).movedim(1, 0), axis)
    return arrived_PBShC.movedim(0, 2).flatten(2, 3)


def exchange(parts_P: Tensor, axis: Axis) -> Tensor:
    """Row p: what rank p had in this rank's row. All ranks call it; sends (cp - 1) / cp of the tensor's bytes.

    Differentiable: the gradient takes the same way back.
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
