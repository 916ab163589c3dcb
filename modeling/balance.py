"""Balancing rules that do not depend on the layout, and how their gradients enter.

Shape letters: B batch (sequences), S sequence, T tokens (B*S), E experts, K top_k.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from modeling.context import PADDING


def sequence_balance_sums(
    affinity_TE: Tensor, indices_TK: Tensor, documents_BS: Tensor, *, has_padding: bool = True
) -> Tensor:
    """Sums over each sequence's real tokens, (B, 2E + 1): pairs sent to each expert, affinity of each expert, tokens.

    Sums over parts of the sequences add up to those over the whole, so ranks that share sequences can add theirs.
    ``has_padding``: some of ``documents_BS`` may be PADDING.
    """
    n_sequences, seq_len = documents_BS.shape
    chosen_TE = torch.zeros_like(affinity_TE)
    if has_padding:
        valid_T1 = (documents_BS != PADDING).to(affinity_TE.dtype).view(-1, 1)
        chosen_TE.scatter_(1, indices_TK, valid_T1.expand_as(indices_TK))
        affinity_TE = affinity_TE * valid_T1
        tokens_B1 = valid_T1.view(n_sequences, -1).sum(1, keepdim=True)
    else:
        chosen_TE.scatter_(1, indices_TK, 1.0)
        tokens_B1 = affinity_TE.new_full((n_sequences, 1), seq_len)
    sums_BE = (each_TE.view(n_sequences, seq_len, -1).sum(1) for each_TE in (chosen_TE, affinity_TE))
    return torch.cat([*sums_BE, tokens_B1], dim=1)


def sequence_balance_losses(sums_BX: Tensor, top_k: int) -> Tensor:
    """Each sequence's balance loss (B,), from its sums: over experts, load share x mean affinity; 1 when even.

    The load share is n_experts / (top_k x tokens) times the pairs sent to the expert (DeepSeek-V3, arXiv:2412.19437,
    eq. 17-20). A sequence is one packed sample; padding counts on neither side. Numbers of pairs and tokens have no
    gradient.
    """
    n_experts = sums_BX.shape[1] // 2
    affinity_BE = sums_BX[:, n_experts:-1]
    chosen_BE, tokens_B1 = sums_BX[:, :n_experts].detach(), sums_BX[:, -1:].detach().clamp(min=1.0)
    return (chosen_BE * (n_experts / top_k) / tokens_B1 * (affinity_BE / tokens_B1)).sum(1)


def z_losses(logits_TE: Tensor) -> Tensor:
    """Each token's router z-loss (T,): logsumexp of its logits, squared (ST-MoE, arXiv:2202.08906, eq. 5)."""
    return logits_TE.logsumexp(-1).square()


def z_losses_and_entropies(logits_TE: Tensor, affinity_TE: Tensor) -> tuple[Tensor, Tensor]:
    """``z_losses``, and each token's entropy (T,) in nats over its affinity to the experts."""
    return z_losses(logits_TE), -torch.special.xlogy(affinity_TE, affinity_TE).sum(-1)


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The selection bias after a step: up by ``rate`` for experts below the mean load, down for those above.

    ``counts_E`` are the pairs of the whole global batch (Wang et al. 2024, arXiv:2408.15664, algorithm 1).
    """
    counts_E = counts_E.double()
    return bias_E + rate * (counts_E.mean() - counts_E).sign().to(bias_E.dtype)


class InjectLoss(Function):
    """Passes ``carrier`` through and adds ``scale`` x ``loss`` to whatever is differentiated downstream.

    So an auxiliary loss reaches the router from any pipeline stage without travelling to the last one. ``scale`` is
    filled in on the loss's device: for a copy of it a CUDA device's host would wait, in each layer.
    """

    @staticmethod
    def forward(ctx, carrier: Tensor, loss: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        ctx.grad_loss = loss.new_full((), scale)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx, grad_carrier: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad_carrier, ctx.grad_loss, None
