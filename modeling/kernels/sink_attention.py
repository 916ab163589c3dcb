"""Attention with sinks, document by document, at the cost of attention without them; forward and backward.

Variable-length kernels have no sinks, but return each query's log-sum-exp. A sink is added to that, and the output is
scaled by the keys' share of the softmax. The kernels' backward passes compute weights from scores and the log-sum-exp,
and take the mean of the weights' gradients from the output: given both with the sink included, they return the right
gradients (as in ring attention).

Shape letters: B batch, S sequence, T tokens of all rows, H heads, G key-value heads, C d_head.
"""

from typing import Any

import torch
from torch import Tensor

from modeling.context import Context
from modeling.kernels.sinks import join_sinks, sinks_gradient
from modeling.kernels.varlen import FLASH, NO_LIMIT, Pieces, PiecesKernel
from modeling.kernels.widths import widened


def sink_attention(
    q_BSHC: Tensor,
    k_BSGC: Tensor,
    v_BSGC: Tensor,
    context: Context,
    window: int | None,
    sinks_H: Tensor,
    kernel: PiecesKernel = FLASH,
) -> Tensor:
    """Attention's output (B, S, H, C), in the queries' dtype, with the sinks (fp32) in each query's softmax.

    ``kernel`` attends within documents: by default FlashAttention, on CUDA in half precision (``fits_flash``). Values
    may have fewer channels than keys.
    """
    boundaries, longest = context.cu_seqlens
    left = NO_LIMIT if window is None else window - 1
    pieces = Pieces(boundaries, boundaries, longest, longest, left, right=0)
    heads_THC = (q_BSHC, k_BSGC, widened(v_BSGC, q_BSHC.shape[-1]))
    out_THC = _SinkAttention.apply(*(each.flatten(0, 1) for each in heads_THC), sinks_H, pieces, kernel)
    return out_THC.view(q_BSHC.shape)[..., : v_BSGC.shape[-1]]


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THC: Tensor,
        k_TGC: Tensor,
        v_TGC: Tensor,
        sinks_H: Tensor,
        pieces: Pieces,
        kernel: PiecesKernel,
    ) -> Tensor:
        out_THC, lse_HT = kernel.forward(q_THC, k_TGC, v_TGC, pieces)
        out_1THC, lse_1HT = join_sinks(out_THC[None].float(), lse_HT[None], sinks_H)
        out_THC = out_1THC[0].to(q_THC.dtype)
        ctx.save_for_backward(q_THC, k_TGC, v_TGC, sinks_H, out_THC, lse_1HT[0])
        ctx.pieces, ctx.kernel = pieces, kernel
        return out_THC

    @staticmethod
    def backward(ctx: Any, grad_THC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_THC, k_TGC, v_TGC, sinks_H, out_THC, lse_HT = ctx.saved_tensors
        whole = (grad_THC.contiguous(), q_THC, k_TGC, v_TGC, out_THC, lse_HT)
        grads = (each.to(q_THC.dtype) for each in ctx.kernel.backward(*whole, ctx.pieces))
        return *grads, sinks_gradient(grad_THC[None], out_THC[None], lse_HT[None], sinks_H), None, None
