"""Attention, linear attention and experts by their formulas, as references for the kernels of modeling/kernels/.

Shape letters: B batch, S keys, Q queries, H heads, G key-value heads, C d_head; T tokens, K top_k, E experts,
D d_model, F d_ff, R the rows of one expert; of linear attention, H value heads, G key heads, W channels of a value.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.context import Context
from modeling.kernels import varlen
from modeling.kernels.short_convolution import short_convolution
from modeling.kernels.varlen import PiecesKernel
from modeling.linear_attention import HeadWeights, Projected, fading_and_writing
from modeling.score_terms import NO_TERMS, ScoreTerms


def attend_reference(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    context: Context,
    window: int | None,
    terms: ScoreTerms = NO_TERMS,
) -> Tensor:
    """Attention's output (B, S, H, C), with the softmax in fp32; a sink is one more score, whose value is zero.

    Dropout is applied to the weights after the softmax.
    """
    groups = q_BSHC.shape[2] // k_BSGC.shape[2]
    k_BSHC, v_BSHC = (heads.repeat_interleave(groups, dim=2) for heads in (k_BSGC, v_BSGC))
    scores_BHQS = torch.einsum("bqhc,bshc->bhqs", q_BSHC.float(), k_BSHC.float()) * q_BSHC.shape[-1] ** -0.5
    if terms.cap is not None:
        scores_BHQS = terms.cap * torch.tanh(scores_BHQS / terms.cap)
    if terms.bias_HN is not None and terms.buckets is not None:
        buckets_BQS = terms.buckets.of(context.positions_BS, context.positions_BS)
        scores_BHQS = scores_BHQS + terms.bias_HN[:, buckets_BQS].transpose(0, 1)
    scores_BHQS = scores_BHQS.masked_fill(~context.mask_BSS(window)[:, None], float("-inf"))
    if terms.alibi is not None:
        distance_BQS = context.positions_BS[:, :, None] - context.positions_BS[:, None]
        slopes_H = terms.alibi.slopes(q_BSHC.device)
        scores_BHQS = scores_BHQS - slopes_H[:, None, None] * distance_BQS[:, None]
    if terms.sinks_H is not None:
        sinks_BHQ1 = terms.sinks_H[:, None, None].expand(*scores_BHQS.shape[:-1], 1)
        weights_BHQS = torch.cat([scores_BHQS, sinks_BHQ1], dim=-1).softmax(-1)[..., :-1]
    else:
        weights_BHQS = scores_BHQS.softmax(-1)
    if terms.dropout is not None:
        places_S = torch.arange(q_BSHC.shape[1])
        weights_BHQS = weights_BHQS * terms.dropout.factors(places_S, 0, len(places_S))
    out_BQHC = torch.einsum("bhqs,bshc->bqhc", weights_BHQS, v_BSHC.float())
    return out_BQHC.to(q_BSHC.dtype)


def gated_delta_reference(
    q_BSGC: Tensor, k_BSGC: Tensor, v_BSHW: Tensor, fading_BSH: Tensor, writing_BSH: Tensor, positions_BS: Tensor
) -> Tensor:
    """The gated delta rule's output (B, S, H, W) in fp64, token by token (arXiv:2412.06464, equation 10).

    Each token multiplies its head's matrix three times: it reads under its key, writes, and reads under its query.
    """
    q, k, v, fading, writing = (each.double() for each in (q_BSGC, k_BSGC, v_BSHW, fading_BSH, writing_BSH))
    q, k = (each.repeat_interleave(v.shape[2] // k.shape[2], dim=2) for each in (q, k))
    q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    # its gradient is computed too, so that in both passes the first token costs as much as any other
    state_BHCW = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3], requires_grad=True)
    outs = []
    for t in range(q.shape[1]):
        state_BHCW = state_BHCW * (positions_BS[:, t] > 0)[:, None, None, None]  # a document begins with zeros
        state_BHCW = state_BHCW * fading[:, t].exp()[..., None, None]
        found_BH1W = k[:, t, :, None] @ state_BHCW
        change_BH1W = writing[:, t, :, None, None] * (v[:, t, :, None] - found_BH1W)
        state_BHCW = state_BHCW + k[:, t, :, :, None] @ change_BH1W
        outs.append(q[:, t, :, None] @ state_BHCW / math.sqrt(q.shape[3]))
    return torch.cat(outs, dim=2).transpose(1, 2)


def mix_reference(projected: Projected, weights: HeadWeights, context: Context, _fuse: object = None) -> Tensor:
    """Linear attention's output (B, S, H, W), with the rule token by token."""
    pairs = zip(projected[:3], weights[:3], strict=True)
    heads = [short_convolution(x.flatten(2), context.positions_BS, taps_XK).view(x.shape) for x, taps_XK in pairs]
    numbers = fading_and_writing(projected.a_BSH, projected.b_BSH, weights.log_rates_H, weights.step_biases_H)
    return gated_delta_reference(*heads, *numbers, context.positions_BS).to(projected.v_BSHW.dtype)


def like_flash() -> PiecesKernel:
    """Attention of pieces by the formula, with FlashAttention's signature and results rounded to the inputs' dtype."""
    plain = varlen.PLAIN

    def forward(q_THC: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        out_THC, lse_HT = plain.forward(q_THC, *rest)
        return out_THC.to(q_THC.dtype), lse_HT

    def backward(grad_THC: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq_THC, dk_UGC, dv_UGC = plain.backward(grad_THC, *rest)
        return dq_THC.to(grad_THC.dtype), dk_UGC.to(grad_THC.dtype), dv_UGC.to(grad_THC.dtype)

    return PiecesKernel(forward, backward)


def experts_reference(
    hidden_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    biases: Sequence[Tensor] | None = None,
    swiglu_limit: float | None = None,
    _fuse: object = None,
    _products: object = None,
) -> Tensor:
    """Each token's weighted sum of its experts' SwiGLU outputs (T, D), computed one expert after another."""
    out_TD = torch.zeros_like(hidden_TD)
    for expert in range(gate_EFD.shape[0]):
        gate_F, up_F, down_D = (None, None, None) if biases is None else [each[expert] for each in biases]
        tokens, slots = (indices_TK == expert).nonzero(as_tuple=True)
        chosen_RD = hidden_TD[tokens]
        gate_RF, up_RF = F.linear(chosen_RD, gate_EFD[expert], gate_F), F.linear(chosen_RD, up_EFD[expert], up_F)
        if swiglu_limit is None:
            inner_RF = F.silu(gate_RF) * up_RF
        else:
            gate_RF = torch.minimum(gate_RF, torch.tensor(swiglu_limit))
            inner_RF = (up_RF.clamp(-swiglu_limit, swiglu_limit) + 1) * gate_RF / (1 + torch.exp(-1.702 * gate_RF))
        result_RD = F.linear(inner_RF, down_EDF[expert], down_D) * weights_TK[tokens, slots, None].to(hidden_TD.dtype)
        out_TD = out_TD.index_add(0, tokens, result_RD)
    return out_TD
