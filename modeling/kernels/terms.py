"""Attention whose scores are capped, biased or joined by sinks, or whose weights are dropped; forward and backward.

Shape letters: B batch, Q queries, S keys, H heads, G key-value heads, C d_head, N buckets of distances.
"""

from typing import Any

import torch
from torch import Tensor

from modeling.dropout import ScoreDropout
from modeling.kernels.blocks import attend_block, attend_block_backward, attend_scored_backward
from modeling.kernels.sinks import join_sinks, sinks_gradient
from modeling.score_terms import ScoreTerms, biased, bucket_sums


def term_attention(
    q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, mask: Tensor, terms: ScoreTerms, buckets_BQS: Tensor | None
) -> Tensor:
    """Attention's output (B, Q, H, C) to the keys that ``mask`` shows, as ``attend_block`` takes it, and to the sinks.

    Values have as many channels as keys. ``buckets_BQS``: ``terms.buckets_of`` these pairs; ``mask`` is bool with them.
    Where weights are dropped, queries and keys are those of whole samples.
    """
    assert terms.dropout is None or q_BQHC.shape[1] == k_BSGC.shape[1]
    tensors = (q_BQHC, k_BSGC, v_BSGC, terms.sinks_H, terms.bias_HN)
    return _TermAttention.apply(*tensors, mask, buckets_BQS, terms.cap, terms.dropout)


class _TermAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BQHC: Tensor,
        k_BSGC: Tensor,
        v_BSGC: Tensor,
        sinks_H: Tensor | None,
        bias_HN: Tensor | None,
        mask: Tensor,
        buckets_BQS: Tensor | None,
        cap: float | None,
        dropout: ScoreDropout | None,
    ) -> Tensor:
        added = mask if bias_HN is None or buckets_BQS is None else biased(mask, bias_HN, buckets_BQS)
        out_BQHC, lse_BHQ = attend_block(q_BQHC, k_BSGC, v_BSGC, added, cap, factors_of_all(dropout, k_BSGC))
        if sinks_H is not None:
            out_BQHC, lse_BHQ = join_sinks(out_BQHC.float(), lse_BHQ, sinks_H)
        out_BQHC = out_BQHC.to(q_BQHC.dtype)
        ctx.save_for_backward(q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ, mask, sinks_H, bias_HN, buckets_BQS)
        ctx.cap, ctx.dropout = cap, dropout
        return out_BQHC

    @staticmethod
    def backward(ctx: Any, grad_BQHC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ, mask, sinks_H, bias_HN, buckets_BQS = ctx.saved_tensors
        pass_BQHC = (grad_BQHC, q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ)
        dbias_HN = None
        if bias_HN is None and ctx.cap is None and ctx.dropout is None:
            grads = attend_block_backward(*pass_BQHC, mask)
        else:
            added = mask if bias_HN is None else biased(mask, bias_HN, buckets_BQS)
            factors_BHQS = factors_of_all(ctx.dropout, k_BSGC)  # drawn again
            *grads, dscores_BHQS = attend_scored_backward(*pass_BQHC, added, ctx.cap, factors_BHQS)
            if bias_HN is not None:
                dbias_HN = bucket_sums(dscores_BHQS, buckets_BQS, bias_HN.shape[1]).float()
        dq_BQHC, dk_BSGC, dv_BSGC = (grad.to(q_BQHC.dtype) for grad in grads)
        dsinks_H = None if sinks_H is None else sinks_gradient(grad_BQHC, out_BQHC, lse_BHQ, sinks_H)
        return dq_BQHC, dk_BSGC, dv_BSGC, dsinks_H, dbias_HN, None, None, None, None


def factors_of_all(dropout: ScoreDropout | None, k_BSGC: Tensor) -> Tensor | None:
    """By what the weights of whole samples are multiplied, where they are dropped."""
    n_keys = k_BSGC.shape[1]
    return None if dropout is None else dropout.factors(torch.arange(n_keys, device=k_BSGC.device), 0, n_keys)
