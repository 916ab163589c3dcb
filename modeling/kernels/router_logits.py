"""The router's logits: a product in fp32 of hidden states and weights that may be in 16 bits.

Shape letters: T tokens, D d_model, E experts, I the dim that is summed over, O columns of the result.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from modeling.kernels.by_rows import widened


class RouterLogits(Function):
    """(hidden_TD, weight_ED) -> hidden_TD @ weight_ED.T in fp32 (T, E). Gradients are computed in fp32, rounded once.

    Both are saved as they are, and widened again in the backward pass: autograd itself would keep the hidden states in
    fp32 as well, beside the 16 bits that the experts keep.
    """

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(hidden_TD, weight_ED)
        return product(in_fp32(hidden_TD), weight_ED.float())

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        hidden_TD, weight_ED = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad
        grad_hidden_TD = product(grad_TE, weight_ED.float().T).to(hidden_TD.dtype) if wants_hidden else None
        grad_weight_ED = product(grad_TE.T, in_fp32(hidden_TD).T).to(weight_ED.dtype) if wants_weight else None
        return grad_hidden_TD, grad_weight_ED


def in_fp32(hidden_TD: Tensor) -> Tensor:
    """The hidden states in fp32, for one product. On a CPU in scratch memory, since pages of new memory are faults."""
    return widened(hidden_TD, "router: hidden") if hidden_TD.is_cpu else hidden_TD.float()


def product(left_TI: Tensor, right_OI: Tensor) -> Tensor:
    """left_TI @ right_OI.T in fp32. On a CPU by oneDNN, since torch itself uses MKL, which is slow on AMD's processors.

    oneDNN's operator takes no empty matrix, and builds of torch without oneDNN lack it.
    """
    if left_TI.is_cpu and left_TI.numel() and right_OI.numel() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return torch.ops.mkldnn._linear_pointwise(left_TI, right_OI, None, "none", [], "")
    return F.linear(left_TI, right_OI)
