"""Token cross-entropy without the full logits: the vocabulary head and the loss, chunk by chunk.

Shape letters: T tokens, D d_model, V vocab_size.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from modeling.dims import Weight

IGNORE = -100  # a target that does not count
CHUNK_LOGITS = 16_777_216  # logits that exist at once (64 MiB in fp32)


# (logits_TV, targets_T, wants_gradient) -> each target's cross-entropy and z-loss (its logits' logsumexp, squared),
# both zero where it does not count; and what is trained, the sum of both, the z-losses times their coefficient,
# differentiated by the logits, or None. The logits may be overwritten.
Losses = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor, Tensor | None]]


class ChunkedCrossEntropy(Function):
    """(hidden_TD, weight_VD, targets_T, chunk_logits, losses) -> the sums of the targets' cross-entropies and z-losses.

    Both are fp64 scalars; the first one's gradient is that of all that is trained, the second has none. ``losses``
    turns one chunk's logits into losses. Gradients are computed with the logits still at hand, so the backward pass
    only scales them. The weight's gradient is summed over chunks in fp32.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk_logits: int, losses: Losses
    ) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        grad_hidden_TD = torch.empty_like(hidden_TD) if wants_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        total, z_total = (torch.zeros((), dtype=torch.float64, device=hidden_TD.device) for _ in range(2))
        chunk = max(1, chunk_logits // weight_VD.shape[0])
        for start in range(0, hidden_TD.shape[0], chunk):
            part = slice(start, start + chunk)
            logits_TV = F.linear(hidden_TD[part], weight_VD).float()
            losses_T, z_losses_T, grad_TV = losses(logits_TV, targets_T[part], wants_hidden or wants_weight)
            total += losses_T.sum(dtype=torch.float64)
            z_total += z_losses_T.sum(dtype=torch.float64)
            if grad_TV is None:
                continue
            grad_TV = grad_TV.to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                torch.mm(grad_TV, weight_VD, out=grad_hidden_TD[part])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_TV.T @ hidden_TD[part]
        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        ctx.mark_non_differentiable(z_total)
        return total, z_total

    @staticmethod
    def backward(  # type: ignore[override]
        ctx, grad_total: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        if grad_hidden_TD is not None:
            grad_hidden_TD = grad_hidden_TD * grad_total.to(torch.float32).to(grad_hidden_TD.device)
        if grad_weight_VD is not None:
            grad_weight_VD = (grad_weight_VD * grad_total.to(torch.float32)).to(ctx.weight_dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None


def losses_and_gradient(
    logits_TV: Tensor, targets_T: Tensor, wants_gradient: bool, z_loss: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``Losses`` over the whole vocabulary; ``z_loss`` is the coefficient."""
    losses_T, logs_T, counts_T = token_losses(logits_TV, targets_T)
    z_losses_T = logs_T.square()
    if not wants_gradient:
        return losses_T, z_losses_T, None
    return losses_T, z_losses_T, logits_gradient(logits_TV, targets_T, counts_T, z_slope(logs_T, z_loss))


def token_losses(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each target's cross-entropy and logsumexp (fp32, zero where it does not count), and which ones count."""
    counts_T = targets_T != IGNORE
    picked_T = logits_TV.gather(1, targets_T.clamp(min=0)[:, None]).squeeze(1)
    logs_T = logits_TV.logsumexp(-1)
    return (logs_T - picked_T) * counts_T, logs_T * counts_T, counts_T


def z_slope(logs_T: Tensor, z_loss: float) -> Tensor | None:
    """The z-losses times their coefficient, differentiated by the logsumexps; None where they are not trained."""
    return 2 * z_loss * logs_T if z_loss else None


def logits_gradient(logits_TV: Tensor, targets_T: Tensor, counts_T: Tensor, z_slope_T: Tensor | None) -> Tensor:
    """What is trained, differentiated by the logits (T, V): softmax, times 1 + ``z_slope_T``, minus one-hot."""
    grad_TV = torch.softmax(logits_TV, -1)
    if z_slope_T is not None:
        grad_TV.mul_(1 + z_slope_T[:, None])
    grad_TV.scatter_add_(1, targets_T.clamp(min=0)[:, None], -torch.ones_like(grad_TV[:, :1]))
    return grad_TV.mul_(counts_T[:, None])


def capped(losses: Losses, cap: float) -> Losses:
    """``losses`` of logits that become ``cap`` times the tanh of themselves over it; their gradient is by those before.

    Beside the chunk's logits there is one more tensor of their size.
    """

    def of_capped(logits_TV: Tensor, targets_T: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        tanh_TV = logits_TV.div_(cap).tanh_()
        slope_TV = 1 - tanh_TV.square() if wants_gradient else None
        losses_T, z_losses_T, grad_TV = losses(tanh_TV.mul_(cap), targets_T, wants_gradient)
        return losses_T, z_losses_T, grad_TV if slope_TV is None or grad_TV is None else grad_TV.mul_(slope_TV)

    return of_capped


class Head(nn.Module):
    """The vocabulary projection and the loss over it. Its weight may be the embedding's own parameter.

    ``z_loss`` is the coefficient of the z-loss (PaLM, arXiv:2204.02311, section 5), which keeps the logits' logsumexp
    near zero. With ``logit_cap`` logits are capped (Gemma 2, arXiv:2408.00118, section 2): losses are of these.
    """

    def __init__(self, vocab_size: int, d_model: int, z_loss: float = 0.0, logit_cap: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, d_model))
        self.stated = {"weight": Weight(("vocab", "d_model"))}
        self.chunk_logits = CHUNK_LOGITS
        self.z_loss = z_loss
        self.logit_cap = logit_cap

    def forward(self, hidden_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The sums of the cross-entropies and the z-losses of the targets that count; without targets, the logits.

        The sums are fp64. The z-losses' gradient, times the coefficient, comes with the cross-entropies'. Logits are
        (B, S, V).
        """
        if targets_BS is None:
            logits_BSV = F.linear(hidden_BSD, self.weight)
            return logits_BSV if self.logit_cap is None else torch.tanh(logits_BSV / self.logit_cap) * self.logit_cap
        # Gradients are made in the forward pass, where torch.no_grad() does not show: a detached weight asks for none.
        weight_VD = self.weight if torch.is_grad_enabled() else self.weight.detach()
        rows = (hidden_BSD.flatten(0, 1), weight_VD, targets_BS.flatten())
        losses = self.chunk_losses if self.logit_cap is None else capped(self.chunk_losses, self.logit_cap)
        return ChunkedCrossEntropy.apply(*rows, self.chunk_logits, losses)

    def chunk_losses(
        self, logits_TV: Tensor, targets_T: Tensor, wants_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One chunk's losses and gradient (``Losses``)."""
        return losses_and_gradient(logits_TV, targets_T, wants_gradient, self.z_loss)
