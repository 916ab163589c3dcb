"""Tensor parallelism with sequence parallelism (Megatron-LM, arXiv:1909.08053 and arXiv:2205.05198).

Between layers each rank of tp holds its part of the positions. Attention and feed-forward layers gather them, compute
with
their heads or channels, and sum and cut the result; norms and routers work on the part. The vocabulary is cut too: no
rank ever holds the full logits. Shape letters: B batch, S sequence, T tokens, D d_model, V the rank's part of the
vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from modeling.decoder import Decoder, DecoderLayer, Embedding
from modeling.feed_forward import SwiGLU
from modeling.loss import IGNORE, Head
from modeling.moe import MoE
from parallel.collectives import gather_sequence, scatter_sum_sequence
from parallel.mesh import Axis


def apply_tensor_parallelism(model: Decoder, axis: Axis) -> None:
    """Makes the decoder compute with its cut weights. Call after the weights are cut; changes no value."""
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        layer.attention.forward = on_whole_sequence(layer.attention.forward, axis)
        if isinstance(layer.feed_forward, MoE):
            layer.feed_forward.forward = on_part_of_sequence(layer.feed_forward.forward)
            if layer.feed_forward.shared is not None:
                gather_around(layer.feed_forward.shared, axis)
        else:
            gather_around(layer.feed_forward, axis)
    if model.embed is not None:
        model.embed.forward = vocab_parallel_embedding(model.embed, axis)
    if model.head is not None:
        model.head.forward = vocab_parallel_head(model.head, axis)


def gather_around(feed_forward: SwiGLU, axis: Axis) -> None:
    """A dense feed-forward layer on gathered positions with its part of the channels."""
    feed_forward.forward = on_whole_sequence(feed_forward.forward, axis)


def on_whole_sequence(forward: Callable[..., Tensor], axis: Axis) -> Callable[..., Tensor]:
    """``forward`` between a gather of the positions and a sum that cuts them again."""

    def run(part_BSD: Tensor, *arguments: Any) -> Tensor:
        return scatter_sum_sequence(forward(gather_sequence(part_BSD, axis), *arguments), axis)

    return run


def on_part_of_sequence(forward: Callable[..., Any]) -> Callable[..., Any]:
    """An MoE layer's ``forward`` with the context of the positions that this rank holds between layers."""

    def run(part_BSD: Tensor, context: Any, layer: int) -> Any:
        return forward(part_BSD, context.part, layer)

    return run


def vocab_parallel_embedding(embed: Embedding, axis: Axis) -> Any:
    """Looks up the tokens whose rows this rank holds; the sum over ranks has them all, cut by position."""

    def run(tokens_BS: Tensor) -> Tensor:
        weight_VD = embed.weight
        local_BS = tokens_BS - axis.rank * weight_VD.shape[0]
        here_BS = (local_BS >= 0) & (local_BS < weight_VD.shape[0])
        hidden_BSD = F.embedding(local_BS.clamp(0, weight_VD.shape[0] - 1), weight_VD) * here_BS[..., None]
        return scatter_sum_sequence(hidden_BSD, axis)

    return run


def vocab_parallel_head(head: Head, axis: Axis) -> Any:
    """The loss over a cut vocabulary: the sum over all positions' targets (fp64), the same on every rank of tp."""

    def run(part_BSD: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        assert targets_BS is not None, "a cut vocabulary gives a loss, not logits"
        hidden_BSD = gather_sequence(part_BSD, axis)
        weight_VD = head.weight if torch.is_grad_enabled() else head.weight.detach()
        targets_T = targets_BS.flatten()
        return VocabParallelCrossEntropy.apply(hidden_BSD.flatten(0, 1), weight_VD, targets_T, head.chunk_logits, axis)

    return run


class VocabParallelCrossEntropy(Function):
    """modeling.loss.ChunkedCrossEntropy over a cut vocabulary: for each chunk a maximum and two sums cross the axis.

    The gradient by ``hidden_TD`` is this rank's summand; gathering the positions sums it on the way back.
    Bytes: 2 (n-1)/n times 12 a token.
    """

    @staticmethod
    def forward(ctx, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, chunk_logits: int, axis: Axis) -> Tensor:  # type: ignore[override]
        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        grad_hidden_TD = torch.empty_like(hidden_TD) if wants_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        total = torch.zeros((), dtype=torch.float64, device=hidden_TD.device)
        chunk = max(1, chunk_logits // weight_VD.shape[0])
        for start in range(0, hidden_TD.shape[0], chunk):
            part = slice(start, start + chunk)
            logits_TV = F.linear(hidden_TD[part], weight_VD).float()
            losses_T, grad_TV = losses_and_gradient(logits_TV, targets_T[part], axis)
            total += losses_T.sum(dtype=torch.float64)
            grad_TV = grad_TV.to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                torch.mm(grad_TV, weight_VD, out=grad_hidden_TD[part])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_TV.T @ hidden_TD[part]
        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
        ctx.weight_dtype = weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx, grad_total: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # type: ignore[override]
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        scale = grad_total.to(torch.float32)
        if grad_hidden_TD is not None:
            grad_hidden_TD = grad_hidden_TD * scale
        if grad_weight_VD is not None:
            grad_weight_VD = (grad_weight_VD * scale).to(ctx.weight_dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None


def losses_and_gradient(logits_TV: Tensor, targets_T: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Each target's cross-entropy, and its gradient by this rank's logits, both zero where a target does not count.

    All ranks of the axis call it. Overwrites ``logits_TV``.
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
    grad_TV /= sums_2T[0][:, None]
    grad_TV.scatter_add_(1, index_T1, -here_T[:, None].to(grad_TV.dtype))
    return losses_T, grad_TV.mul_(counts_T[:, None])
