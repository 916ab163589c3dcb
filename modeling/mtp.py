"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): modules that predict tokens further ahead.

Shape letters: B batch, S sequence, D d_model.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modeling.config import ModelConfig
from modeling.linear import Linear
from modeling.loss import IGNORE
from modeling.norm import Norm, build_norm
from modeling.transfer import to_device


@dataclass
class Ahead:
    """What the prediction module of one depth k is given besides hidden states."""

    tokens_BS: Tensor  # int64, each position's k-th following token of its document; 0 where the sample has none
    targets_BS: Tensor  # int64, the token after that one; IGNORE where the sample has none
    scale: float  # the weight of one target's loss in the total that is differentiated

    def to(self, device: torch.device) -> "Ahead":
        """A copy of this, which lies on the CPU, on the device."""
        tokens_BS, targets_BS = (to_device(each, device) for each in (self.tokens_BS, self.targets_BS))
        return Ahead(tokens_BS, targets_BS, self.scale)


class PredictionModule(nn.Module):
    """The modules around one decoder layer of multi-token prediction: its input projection, and the norm after it.

    The decoder layer itself is one of ``Decoder.layers``.
    """

    def __init__(self, embed_norm: Norm, hidden_norm: Norm, project: Linear, final_norm: Norm) -> None:
        super().__init__()
        self.embed_norm = embed_norm
        self.hidden_norm = hidden_norm
        self.project = project
        self.final_norm = final_norm

    def forward(self, embedded_BSD: Tensor, hidden_BSD: Tensor) -> Tensor:
        """The layer's input (B, S, D), from the following tokens' embeddings and the hidden states so far."""
        return self.project(torch.cat([self.embed_norm(embedded_BSD), self.hidden_norm(hidden_BSD)], dim=-1))


def build_prediction_modules(config: ModelConfig) -> dict[int, PredictionModule]:
    """The prediction modules by the number of their decoder layer; none in a model without multi-token prediction."""
    width = config.d_model
    return {
        layer: PredictionModule(
            build_norm(config),
            build_norm(config),
            Linear(width, 2 * width, ("d_model", "token_and_hidden")),
            build_norm(config),
        )
        for layer in config.mtp_layers
    }


def following(next_BS: Tensor, depth: int, targets_BS: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, for each depth k from 1, each position's k-th following token and, as its target, the token after that.

    Both are int64 (B, S). ``next_BS`` are the first following tokens of whole sequences in their natural order, IGNORE
    where a document, or the sample, has no token left. There the yielded targets are IGNORE too, while the tokens are
    0, so that they can be embedded. ``targets_BS`` is ``next_BS`` with IGNORE where a token is not trained on; None:
    all are.
    """
    nearer_BS = next_BS
    for _ in range(depth):
        further_BS = _shifted(nearer_BS, next_BS)
        targets_BS = _shifted(targets_BS, next_BS) if targets_BS is not None else None
        yield nearer_BS.where(nearer_BS != IGNORE, 0), further_BS if targets_BS is None else targets_BS
        nearer_BS = further_BS


def _shifted(each_BS: Tensor, next_BS: Tensor) -> Tensor:
    """Each position's value at the following position; IGNORE where that belongs to another document."""
    end_B1 = torch.full_like(each_BS[:, :1], IGNORE)
    return torch.cat([each_BS[:, 1:], end_B1], dim=1).where(next_BS != IGNORE, IGNORE)
