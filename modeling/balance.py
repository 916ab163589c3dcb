"""The losses and the bias rule that balance the load of experts, and how the losses' gradients enter.

Shape letters: B batch (sequences), S sequence, T tokens (B*S), E experts, K top_k.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from modeling.context import PADDING


def sequence_balance_sums(
    affinity_TE: Tensor, indices_TK: Tensor, documents_BS: Tensor, *, has_padding: bool = True
) -> Tensor:
    """Sums over each sequence's real tokens (B, 2E + 1): pairs sent to each expert, affinity of each expert, tokens.

    Sums over parts of a sequence add up to those over the whole, so ranks that share sequences can add theirs.
    ``has_padding`` says that some of ``documents_BS`` may be PADDING.
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
    """Each sequence's balance loss (B,), from its sums: over experts, load share x mean affinity. It is 1 when even.

    The load share is the pairs sent to the expert times n_experts / (top_k x tokens) (DeepSeek-V3, arXiv:2412.19437,
    eq. 17-20). A sequence is one packed sample; padding does not count. Gradients flow through the affinity alone, not
    through the numbers of pairs and tokens.
    """
    n_experts = sums_BX.shape[1] // 2
    affinity_BE = sums_BX[:, n_experts:-1]
    chosen_BE, tokens_B1 = sums_BX[:, :n_experts].detach(), sums_BX[:, -1:].detach().clamp(min=1.0)
    return (chosen_BE * (n_experts / top_k) / tokens_B1 * (affinity_BE / tokens_B1)).sum(1)


def z_losses(logits_TE: Tensor) -> Tensor:
    """Each token's router z-loss (T,): the square of its logits' logsumexp (ST-MoE, arXiv:2202.08906, eq. 5)."""
    return logits_TE.logsumexp(-1).square()


def z_losses_and_entropies(logits_TE: Tensor, affinity_TE: Tensor) -> tuple[Tensor, Tensor]:
    """Each token's router z-loss (T,), and the entropy (T,) in nats of its affinity to the experts."""
    if affinity_TE.is_cpu:  # torch.special.xlogy takes three times as long there, and on a GPU two launches less
        least = torch.finfo(affinity_TE.dtype).tiny  # 0 log 0 is 0
        terms_TE = affinity_TE * affinity_TE.clamp(min=least).log()
    else:
        terms_TE = torch.special.xlogy(affinity_TE, affinity_TE)
    return z_losses(logits_TE), -terms_TE.sum(-1)


def updated_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """The selection bias after a step: up by ``rate`` for experts below the mean load, down for those above.

    ``counts_E`` are the token-expert pairs of the whole global batch (Wang et al. 2024, arXiv:2408.15664, algorithm 1).
    """
    counts_E = counts_E.double()
    return bias_E + rate * (counts_E.mean() - counts_E).sign().to(bias_E.dtype)


class InjectLoss(Function):
    """Returns ``carrier`` as it is, and adds ``scale`` x ``loss`` to whatever total loss is differentiated downstream.

    So an auxiliary loss reaches the router from any pipeline stage, without being sent to the last one. ``scale`` is a
    number that is filled in on the loss's device: copying it there would make a CUDA device's host wait, in each layer.
    """

    @staticmethod
    def forward(ctx, carrier: Tensor, loss: Tensor, scale: float) -> Tensor:  # type: ignore[override]
        ctx.grad_loss = loss.new_full((), scale)
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx, grad_carrier: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grad_carrier, ctx.grad_loss, None
