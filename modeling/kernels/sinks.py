"""Attention sinks: a logit for each head that joins each query's softmax and carries no value.

Shape letters: B batch, Q queries, H heads, C d_head.
"""

import torch
from torch import Tensor


def join_sinks(out_BQHC: Tensor, lse_BHQ: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Attention's output and log-sum-exp with the sinks in the softmax, from those without; in the inputs' dtypes."""
    joined_BHQ = torch.logaddexp(lse_BHQ, sinks_H[:, None].to(lse_BHQ.dtype))
    share_BHQ = torch.exp(lse_BHQ - joined_BHQ)  # of the keys
    return out_BQHC * share_BHQ.transpose(1, 2)[..., None].to(out_BQHC.dtype), joined_BHQ


def sinks_gradient(grad_BQHC: Tensor, out_BQHC: Tensor, lse_BHQ: Tensor, sinks_H: Tensor) -> Tensor:
    """The sinks' gradient (H,), fp32, from attention's output and log-sum-exp with the sinks included.

    In a softmax over keys, a score's gradient is its weight times the difference between its value's product with the
    output's gradient and the mean of these products, which is the output's own. A sink's value is zero, so its gradient
    is minus its weight times that mean.
    """
    mean_BQH = (grad_BQHC.float() * out_BQHC.float()).sum(-1)
    weights_BQH = torch.exp(sinks_H[:, None] - lse_BHQ).transpose(1, 2)
    return -(weights_BQH * mean_BQH).sum((0, 1))
