"""Ring attention's work on one device: what each cp rank computes, rank after rank, without the messages.

Shape letters: B batch, N all positions, S positions that a rank holds, H heads, G key-value heads, C d_head.
"""

from typing import Any

import torch
from torch import Tensor

from kernel_references import like_flash
from modeling.context import Context
from modeling.kernels.sinks import join_sinks, sinks_gradient
from modeling.kernels.varlen import FLASH, PiecesKernel
from modeling.score_terms import ScoreTerms
from parallel.context_parallel.context import split_context
from parallel.context_parallel.part import held_positions
from parallel.context_parallel.ring import attend_pieces, attend_pieces_backward
from parallel.mesh import Axis


def ring_on_one_device(
    q_BNHC: Tensor,
    k_BNGC: Tensor,
    v_BNGC: Tensor,
    context: Context,
    window: int | None,
    terms: ScoreTerms,
    *,
    cp: int,
    kernel: PiecesKernel | None = None,
) -> Tensor:
    """Attention's output (B, N, H, C) by ``cp`` ranks' calls of ``kernel``; 2 * cp divides N.

    None: FlashAttention on CUDA, and elsewhere the formula with results rounded as FlashAttention's are.
    """
    kernel = kernel or (FLASH if q_BNHC.is_cuda else like_flash())
    return _Ring.apply(q_BNHC, k_BNGC, v_BNGC, terms.sinks_H, context, window, cp, kernel)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BNHC: Tensor,
        k_BNGC: Tensor,
        v_BNGC: Tensor,
        sinks_H: Tensor | None,
        context: Context,
        window: int | None,
        cp: int,
        kernel: PiecesKernel,
    ) -> Tensor:
        batch, seq_len, n_heads, _ = q_BNHC.shape
        out_BNHC = torch.empty_like(q_BNHC)
        lse_BHN = q_BNHC.new_empty((batch, n_heads, seq_len), dtype=torch.float32)
        places = [held_positions(seq_len, rank, cp, q_BNHC.device) for rank in range(cp)]
        plans = []
        for rank, mine in enumerate(places):
            axis = Axis(rank, cp, tuple(range(cp)), None)
            plans.append(split_context(context, axis).pieces(window, axis))
            q_BSHC = q_BNHC[:, mine]
            out_BSHC = torch.zeros_like(q_BSHC, dtype=torch.float32)
            lse_HBS = out_BSHC.new_full((n_heads, batch, len(mine)), float("-inf"), dtype=torch.float64)
            for step in range(cp):
                theirs = places[(rank - step) % cp]
                for number, call in enumerate(plans[rank][(rank - step) % cp]):
                    heads = (q_BSHC, k_BNGC[:, theirs], v_BNGC[:, theirs])
                    attend_pieces(*heads, out_BSHC, lse_HBS, call, kernel, is_first=step == number == 0)
            lse_BHS = lse_HBS.transpose(0, 1)
            if sinks_H is not None:
                out_BSHC, lse_BHS = join_sinks(out_BSHC, lse_BHS, sinks_H)
            out_BNHC[:, mine], lse_BHN[:, :, mine] = out_BSHC.to(q_BNHC.dtype), lse_BHS.float()
        ctx.save_for_backward(q_BNHC, k_BNGC, v_BNGC, sinks_H, out_BNHC, lse_BHN)
        ctx.places, ctx.plans, ctx.kernel = places, plans, kernel
        return out_BNHC

    @staticmethod
    def backward(ctx: Any, grad_BNHC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BNHC, k_BNGC, v_BNGC, sinks_H, out_BNHC, lse_BHN = ctx.saved_tensors
        dq_BNHC = torch.empty_like(q_BNHC)
        dkv_2BNGC = torch.zeros_like(torch.stack([k_BNGC, v_BNGC]), dtype=torch.float32)
        for mine, plan in zip(ctx.places, ctx.plans, strict=True):
            whole = (grad_BNHC[:, mine], out_BNHC[:, mine], lse_BHN[:, :, mine].transpose(0, 1))
            dq_BSHC = torch.zeros_like(whole[0], dtype=torch.float32)
            for theirs, calls in zip(ctx.places, plan, strict=True):
                heads = (q_BNHC[:, mine], k_BNGC[:, theirs], v_BNGC[:, theirs])
                found_2BSGC = torch.zeros_like(dkv_2BNGC[:, :, theirs])
                for call in calls:
                    attend_pieces_backward(*whole, *heads, dq_BSHC, found_2BSGC, call, ctx.kernel)
                dkv_2BNGC[:, :, theirs] += found_2BSGC
            dq_BNHC[:, mine] = dq_BSHC.to(dq_BNHC.dtype)
        dk_BNGC, dv_BNGC = dkv_2BNGC.to(k_BNGC.dtype)
        dsinks_H = None if sinks_H is None else sinks_gradient(grad_BNHC, out_BNHC, lse_BHN, sinks_H)
        return dq_BNHC, dk_BNGC, dv_BNGC, dsinks_H, None, None, None, None
