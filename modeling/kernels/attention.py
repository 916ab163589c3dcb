"""Attention cores for packed documents: causal within each document, optionally within a sliding window.

Shape letters: B batch, S keys, Q queries, H heads, G key-value heads, C d_head.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.context import Context
from modeling.kernels.terms import term_attention
from modeling.score_terms import NO_TERMS, ScoreTerms


def attend(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    context: Context,
    window: int | None,
    terms: ScoreTerms = NO_TERMS,
) -> Tensor:
    """Attention's output (B, S, H, C), by the fastest kernel that fits the device, the dtype and the scores' terms.

    CUDA in half precision takes variable-length flash attention, which never forms a mask; everything else
    takes ``masked_attention``. Flash attention knows no terms: with them, on CUDA, B * S * S numbers of a mask are
    made, with slopes H times as many, once for all layers of one window; other terms take fp32 scores in each layer.
    """
    if terms.is_plain and q_BSHC.is_cuda and q_BSHC.dtype in (torch.bfloat16, torch.float16):
        return varlen_attention(q_BSHC, k_BSGC, v_BSGC, context, window)
    mask = context.mask_BSS(window) if terms.alibi is None else context.mask_BHSS(window, terms.alibi)
    buckets_BSS = None if terms.buckets is None else context.buckets_BSS(terms.buckets)
    return masked_attention(q_BSHC, k_BSGC, v_BSGC, mask, terms, buckets_BSS)


def masked_attention(
    q_BQHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    mask: Tensor,
    terms: ScoreTerms = NO_TERMS,
    buckets_BQS: Tensor | None = None,
) -> Tensor:
    """Attention's output (B, Q, H, C) to the keys that ``mask`` shows, and to the sinks where there are any.

    ``mask``: bool (B, Q, S), or fp32 (B, H, Q, S), which is added to the scores and is -inf where a key is not seen: it
    holds the slopes of ``terms``. ``buckets_BQS``: those of ``terms.buckets_of`` these pairs.
    """
    if terms.sinks_H is not None or terms.needs_formula:
        wide_BSGC = widened(v_BSGC, k_BSGC.shape[-1])
        return term_attention(q_BQHC, k_BSGC, wide_BSGC, mask, terms, buckets_BQS)[..., : v_BSGC.shape[-1]]
    groups = q_BQHC.shape[2] // k_BSGC.shape[2]
    if groups > 1:
        k_BSGC, v_BSGC = (heads.repeat_interleave(groups, dim=2) for heads in (k_BSGC, v_BSGC))
    q_BHQC, k_BHSC, v_BHSC = (heads.transpose(1, 2) for heads in (q_BQHC, k_BSGC, v_BSGC))
    mask_BHQS = mask[:, None] if mask.dtype == torch.bool else mask.to(q_BQHC.dtype) if mask.is_cuda else mask
    return F.scaled_dot_product_attention(q_BHQC, k_BHSC, v_BHSC, attn_mask=mask_BHQS).transpose(1, 2)


def varlen_attention(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, context: Context, window: int | None) -> Tensor:
    """Attention's output by FlashAttention over the documents' boundaries (CUDA, bf16 or fp16)."""
    from torch.nn.attention.varlen import varlen_attn

    n_channels = v_BSGC.shape[-1]
    v_BSGC = widened(v_BSGC, k_BSGC.shape[-1])

    boundaries, longest = context.cu_seqlens
    left = -1 if window is None else window - 1
    out_THC = varlen_attn(
        q_BSHC.flatten(0, 1),
        k_BSGC.flatten(0, 1),
        v_BSGC.flatten(0, 1),
        boundaries,
        boundaries,
        longest,
        longest,
        window_size=(left, 0),
        enable_gqa=q_BSHC.shape[2] != k_BSGC.shape[2],
    )
    assert isinstance(out_THC, Tensor)
    return out_THC.view_as(q_BSHC)[..., :n_channels]


def widened(v_BSGC: Tensor, n_channels: int) -> Tensor:
    """Values with ``n_channels``, filled up with zeros, for code that wants them as wide as queries and keys.

    Attention's output then has zeros in the same channels.
    """
    missing = n_channels - v_BSGC.shape[-1]
    return F.pad(v_BSGC, (0, missing)) if missing else v_BSGC
