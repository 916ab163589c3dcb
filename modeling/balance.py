"""Balancing rules that do not depend on the layout, and how their gradients enter.

Shape letters: B batch (sequences), S sequence, T tokens (B*S), E experts, K top_k.
"""

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from modeling.context import PADDING


def sequence_balance_losses(affinity_TE: Tensor, indices_TK: Tensor, documents_BS: Tensor) -> Tensor:
    """Each sequence's balance loss (B,): sum over experts of load share x mean affinity, 1 when even.

    The load share is n_experts / (top_k x tokens) times the pairs sent to the expert (DeepSeek-V3, arXiv:2412.19437,
    eq. 17-20). A sequence is one packed sample; padding counts on neither side.
    """
    n_sequences = documents_BS.shape[0]
    n_experts, top_k = affinity_TE.shape[1], indices_TK.shape[1]
    valid_BS = (documents_BS != PADDING).float()
    tokens_B = valid_BS.sum(1).clamp(min=1.0)
    chosen_TE = F.one_hot(indices_TK, n_experts).sum(1).float() * valid_BS.view(-1, 1)
    load_BE = chosen_TE.view(n_sequences, -1, n_experts).sum(1) * (n_experts / top_k) / tokens_B[:, None]
    mean_affinity_BE = (affinity_TE * valid_BS.view(-1, 1)).view(n_sequences, -1, n_experts).sum(1) / tokens_B[:, None]
    return (load_BE * mean_affinity_BE).sum(1)


def z_losses(logits_TE: Tensor) -> Tensor:
    """Each token's router z-loss (T,): logsumexp of its logits, squared (ST-MoE, arXiv:2202.08906, eq. 5)."""
    return logits_TE.logsumexp(-1).square()


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The selection bias after a step: up by ``rate`` for experts below the mean load, down for those above.

    ``counts_E`` are the pairs of the whole global batch (Wang et al. 2024, arXiv:2408.15664, algorithm 1).
    """
    counts_E = counts_E.double()
    return bias_E + rate * (counts_E.mean() - counts_E).sign().to(bias_E.dtype)


class InjectLoss(Function):
    """Passes ``carrier`` through and adds ``scale`` x ``loss`` to whatever is differentiated downstream.

    So an auxiliary loss reaches the router from any pipeline stage without travelling to the last one.
    """

    @staticmethod
    def forward(ctx, carrier: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:  # type: ignore[override]
        ctx.grad_loss = torch.as_tensor(scale, dtype=loss.dtype, device=loss.device)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx, grad_carrier: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad_carrier, ctx.grad_loss, None
