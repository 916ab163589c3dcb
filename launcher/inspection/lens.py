"""The logit lens: what the head would predict from the residual stream after each layer (nostalgebraist 2020).

Each layer's residual goes through the model's own final norm, divisor and head. After the last layer that is what the
model computes, so the logits have to equal the model's bit for bit, which is checked (``Lens.is_exact``).

Shape letters: B batch (one row), L layers and the embedding before them, S sequence, K top_k, V vocab_size.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from launcher.inspection.seen import Seen
from modeling.decoder import Decoder


@dataclass
class Lens:
    """What each layer would predict at each place of one text; row 0 is the embedding, row l + 1 layer l."""

    top_LSK: np.ndarray  # int64, the likeliest tokens
    probability_LSK: np.ndarray  # fp32, their probabilities
    next_rank_LS: np.ndarray  # int64 (L, S - 1): the rank of the text's next token among all tokens, from 1
    next_probability_LS: np.ndarray  # fp32 (L, S - 1): that token's probability
    next_loss_LS: np.ndarray  # fp64 (L, S - 1): its negative log-likelihood in nats
    is_exact: bool  # the last row's logits are the model's, bit for bit


@torch.no_grad()
def lens_logits(model: Decoder, residual_BSD: Tensor) -> Tensor:
    """The logits (B, S, V) of a residual, by the model's own final norm, divisor and head."""
    logits_BSV = model.head(model.divided(model.final_norm(residual_BSD)))
    assert isinstance(logits_BSV, Tensor)
    return logits_BSV


@torch.no_grad()
def look_through(model: Decoder, seen: Seen, tokens_S: Tensor, top_k: int) -> Lens:
    """The lens of a pass over one row of tokens. Only one layer's logits exist at a time."""
    rows: list[tuple[np.ndarray, ...]] = []
    logits_BSV = None
    for residual_BSD in seen.residuals:
        logits_BSV = lens_logits(model, residual_BSD)
        rows.append(_row(logits_BSV[0].float(), tokens_S, top_k))
    assert logits_BSV is not None and seen.logits_BSV is not None
    return Lens(
        *(np.stack(each) for each in zip(*rows, strict=True)), is_exact=torch.equal(logits_BSV, seen.logits_BSV)
    )


def _row(logits_SV: Tensor, tokens_S: Tensor, top_k: int) -> tuple[np.ndarray, ...]:
    """One layer's rows of the arrays of ``Lens``, in the same order."""
    best = logits_SV.topk(min(top_k, logits_SV.shape[1]), dim=-1)
    logsumexp_S1 = logits_SV.logsumexp(-1, keepdim=True)
    of_next_S1 = logits_SV[:-1].gather(1, tokens_S[1:, None])
    rank_S = (logits_SV[:-1] > of_next_S1).sum(-1) + 1
    logs_S = (of_next_S1 - logsumexp_S1[:-1])[:, 0]
    found = (best.indices, (best.values - logsumexp_S1).exp(), rank_S, logs_S.exp(), -logs_S.double())
    return tuple(each.cpu().numpy() for each in found)
