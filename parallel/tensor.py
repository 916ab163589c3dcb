"""Tensor parallelism with sequence parallelism (Megatron-LM, arXiv:1909.08053 and arXiv:2205.05198).

Between layers each rank of tp holds its part of the positions. Attention and feed-forward layers all-gather them,
compute with the rank's heads or channels, and reduce-scatter the result; norms and routers work on the rank's part. The
vocabulary is cut too: no rank ever holds the full logits. Shape letters: B batch, S sequence, T tokens, D d_model, V
the rank's part of the vocabulary.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.decoder import Decoder, Embedding
from modeling.feed_forward import FeedForward
from modeling.loss import IGNORE, Head, z_slope
from modeling.mixer import Mixer
from modeling.norm import RMSNorm, rms_norm
from modeling.positions import Positions
from parallel.collectives import gather_sequence, scatter_sum_sequence, sum_both_ways
from parallel.layout import AXIS_OF
from parallel.mesh import Axis


def apply_tensor_parallelism(model: Decoder, axis: Axis) -> None:
    """Makes the decoder compute with weights that are cut over ``axis`` (tp): sets its collectives and layers.

    Call it after the weights are cut. Changes no value and sends nothing.
    """
    shared = SharedPositions(axis)
    for module in model.modules():
        if isinstance(module, Mixer | FeedForward):
            module.positions = shared
        for name, child in module.named_children():
            if isinstance(child, RMSNorm) and AXIS_OF[child.stated["weight"].dims[0]] == "tp":
                module.register_module(name, CutRMSNorm(child, axis))
    if model.embed is not None:
        model.embed = VocabParallelEmbedding(model.embed, axis)
    if model.head is not None:
        model.head = VocabParallelHead(model.head, axis)


class SharedPositions(Positions):
    """The positions of a sequence, of which each rank of tp holds an equal part between layers."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.rank, self.degree = axis.rank, axis.degree

    def gather(self, hidden_BSD: Tensor) -> Tensor:
        """From this rank's part of the positions (B, S/n, D) to all of them (B, S, D). All ranks of tp call it."""
        return gather_sequence(hidden_BSD, self.axis)

    def scatter_sum(self, partial_BSD: Tensor) -> Tensor:
        """From each rank's summand (B, S, D) to this rank's part of the sum (B, S/n, D). All ranks of tp call it."""
        return scatter_sum_sequence(partial_BSD, self.axis)


class CutRMSNorm(RMSNorm):
    """An RMS norm over a dim of which this rank holds a part. Takes over the weight of ``norm``.

    One mean a token is all-reduced in the forward and one in the backward pass: 2 (n-1)/n times 4 bytes each.
    """

    def __init__(self, norm: RMSNorm, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight, self.stated = norm.weight, norm.stated
        self.norm_eps, self.adds_one = norm.norm_eps, norm.adds_one
        self.axis = axis

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden``, normalized by the mean square over all ranks' channels. All ranks of tp call it."""
        numbers = {"norm_eps": self.norm_eps, "adds_one": self.adds_one}
        return rms_norm(hidden, self.weight, **numbers, mean_of_all=self.mean_of_all)

    def mean_of_all(self, mean_square: Tensor) -> Tensor:
        """The mean over all ranks' channels, from each rank's mean over its equal part. All ranks of tp call it."""
        return sum_both_ways(mean_square, self.axis) / self.axis.degree


class VocabParallelEmbedding(Embedding):
    """An embedding of which this rank holds an equal part of the rows. Takes over the weight of ``embed``."""

    def __init__(self, embed: Embedding, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight, self.stated = embed.weight, embed.stated
        self.axis = axis

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """The tokens' embeddings at this rank's positions (B, S/n, D), from the tokens at all positions (B, S).

        Each rank looks up the rows that it holds, with zeros for all other tokens, and these are reduce-scattered:
        (n-1)/n of the bytes of (B, S, D). All ranks of tp call it.
        """
        weight_VD = self.weight
        local_BS = tokens_BS - self.axis.rank * weight_VD.shape[0]
        here_BS = (local_BS >= 0) & (local_BS < weight_VD.shape[0])
        hidden_BSD = F.embedding(local_BS.clamp(0, weight_VD.shape[0] - 1), weight_VD) * here_BS[..., None]
        return scatter_sum_sequence(hidden_BSD, self.axis)


class VocabParallelHead(Head):
    """The head and the loss over a vocabulary that is cut over tp. Takes over the weight of ``head``.

    For each chunk of tokens a maximum and two sums are all-reduced: 2 (n-1)/n times 12 bytes a token. Each rank
    computes a summand of the gradient by the hidden states; these are summed by the reduce-scatter that is the backward
    pass of gathering the positions.
    """

    def __init__(self, head: Head, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight, self.stated = head.weight, head.stated
        self.chunk_logits, self.z_loss, self.logit_cap = head.chunk_logits, head.z_loss, head.logit_cap
        self.watch = head.watch
        self.axis = axis

    def forward(self, hidden_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The sums of cross-entropies and of z-losses over all positions (fp64 scalars), the same on every rank of tp.

        ``hidden_BSD``: the hidden states at this rank's positions. ``targets_BS``: the targets of all positions, which
        must be given. All ranks of tp call it.
        """
        assert targets_BS is not None, "a cut vocabulary gives a loss, not logits"
        return super().forward(gather_sequence(hidden_BSD, self.axis), targets_BS)

    def chunk_losses(
        self, logits_TV: Tensor, targets_T: Tensor, wants_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One chunk's losses and gradient, from this rank's part of the logits. All ranks of tp call it."""
        return losses_and_gradient(logits_TV.float(), targets_T, self.axis, self.z_loss)


def losses_and_gradient(
    logits_TV: Tensor, targets_T: Tensor, axis: Axis, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Each target's cross-entropy and squared logsumexp, and their sum's gradient by this rank's part of the logits.

    Before: each rank of the axis holds its part of the vocabulary's logits (T, V), and all targets (T). After: the same
    losses (T) on every rank, zero where a target is IGNORE, and another part of the gradient (T, V) on each. The
    squared logsumexp is the z-loss, which enters the gradient times the coefficient ``z_loss``. All ranks of the axis
    call it. Overwrites ``logits_TV``. Bytes: 2 (n-1)/n times 12 a token in fp32.
    """
    n_local = logits_TV.shape[1]
    local_T = targets_T - axis.rank * n_local
    here_T = (local_T >= 0) & (local_T < n_local) & (targets_T != IGNORE)
    index_T1 = local_T.clamp(0, n_local - 1)[:, None]
    largest_T = logits_TV.amax(-1)
    dist.all_reduce(largest_T, op=dist.ReduceOp.MAX, group=axis.group)
    logits_TV -= largest_T[:, None]
    picked_T = logits_TV.gather(1, index_T1).squeeze(1) * here_T
    grad_TV = logits_TV.exp_()
    sums_2T = torch.stack([grad_TV.sum(-1), picked_T])
    dist.all_reduce(sums_2T, group=axis.group)
    counts_T = targets_T != IGNORE
    losses_T = (sums_2T[0].log() - sums_2T[1]) * counts_T
    logs_T = (sums_2T[0].log() + largest_T) * counts_T
    grad_TV /= sums_2T[0][:, None]
    slope_T = z_slope(logs_T, z_loss)
    if slope_T is not None:
        grad_TV.mul_(1 + slope_T[:, None])
    grad_TV.scatter_add_(1, index_T1, -here_T[:, None].to(grad_TV.dtype))
    return losses_T, logs_T.square(), grad_TV.mul_(counts_T[:, None])
