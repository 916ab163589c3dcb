"""The router's logits: a product in fp32 of hidden states and weights that may have fewer bits.

Shape letters: T tokens, D d_model, E experts.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F


def router_logits(hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """hidden_TD @ weight_ED.T in fp32 (T, E); gradients are computed in fp32 too, and rounded once.

    On a CPU by oneDNN, where torch itself asks MKL: on processors of AMD that takes 2.6 times as long.
    """
    if hidden_TD.is_cpu and hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # a torch without oneDNN has none
        return LogitsByOneDnn.apply(hidden_TD, weight_ED)
    return F.linear(hidden_TD.float(), weight_ED.float())


class LogitsByOneDnn(Function):
    """(hidden_TD, weight_ED) -> logits_TE. Saved are both as they are; they are widened again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_ED: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(hidden_TD, weight_ED)
        return product(hidden_TD.float(), weight_ED.float())

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        hidden_TD, weight_ED = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad
        grad_hidden_TD = product(grad_TE, weight_ED.float().T).to(hidden_TD.dtype) if wants_hidden else None
        grad_weight_ED = product(grad_TE.T, hidden_TD.float().T).to(weight_ED.dtype) if wants_weight else None
        return grad_hidden_TD, grad_weight_ED


def product(left_TI: Tensor, right_OI: Tensor) -> Tensor:
    """left_TI @ right_OI.T in fp32, by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(left_TI, right_OI, None, "none", [], "")
