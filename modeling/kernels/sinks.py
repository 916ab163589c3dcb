"""Attention with sinks: for each head a logit that joins the softmax and carries no value.

Shape letters: B batch, Q queries, S keys, H heads, G key-value heads, C d_head.
"""

from typing import Any

import torch
from torch import Tensor

from modeling.kernels.blocks import attend_block, attend_block_backward


def sink_attention(q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, mask: Tensor, sinks_H: Tensor) -> Tensor:
    """Attention's output (B, Q, H, C) to the keys that ``mask`` shows, as ``attend_block`` takes it, and to the sinks.

    Values have as many channels as keys.
    """
    return _SinkAttention.apply(q_BQHC, k_BSGC, v_BSGC, mask, sinks_H)


def join_sinks(out_BQHC: Tensor, lse_BHQ: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Attention's output and log-sum-exp with the sinks in the softmax, from those without, in their dtypes."""
    joined_BHQ = torch.logaddexp(lse_BHQ, sinks_H[:, None].to(lse_BHQ.dtype))
    share_BHQ = torch.exp(lse_BHQ - joined_BHQ)  # of the keys
    return out_BQHC * share_BHQ.transpose(1, 2)[..., None].to(out_BQHC.dtype), joined_BHQ


def sinks_gradient(grad_BQHC: Tensor, out_BQHC: Tensor, lse_BHQ: Tensor, sinks_H: Tensor) -> Tensor:
    """dsinks_H, fp32, from attention's output and log-sum-exp with the sinks in them.

    A softmax's gradient by a score is its weight times what its value's part in the loss differs by from the mean over
    all values. A sink's value is nothing, and that mean is the output's part.
    """
    mean_BQH = (grad_BQHC.float() * out_BQHC.float()).sum(-1)
    weights_BQH = torch.exp(sinks_H[:, None] - lse_BHQ).transpose(1, 2)
    return -(weights_BQH * mean_BQH).sum((0, 1))


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BQHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, mask: Tensor, sinks_H: Tensor) -> Tensor:
        out_BQHC, lse_BHQ = attend_block(q_BQHC, k_BSGC, v_BSGC, mask)
        out_BQHC, lse_BHQ = join_sinks(out_BQHC.float(), lse_BHQ, sinks_H)
        out_BQHC = out_BQHC.to(q_BQHC.dtype)
        ctx.save_for_backward(q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ, mask, sinks_H)
        return out_BQHC

    @staticmethod
    def backward(ctx: Any, grad_BQHC: Tensor) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:  # type: ignore[override]
        q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ, mask, sinks_H = ctx.saved_tensors
        grads = attend_block_backward(grad_BQHC, q_BQHC, k_BSGC, v_BSGC, out_BQHC, lse_BHQ, mask)
        dq_BQHC, dk_BSGC, dv_BSGC = (grad.to(q_BQHC.dtype) for grad in grads)
        return dq_BQHC, dk_BSGC, dv_BSGC, None, sinks_gradient(grad_BQHC, out_BQHC, lse_BHQ, sinks_H)
