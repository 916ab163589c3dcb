"""What attention does to scores besides queries times keys: slopes, trained biases, a cap, sinks and dropout.

Shape letters: B batch, Q queries, S keys, H heads, N buckets of distances.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modeling.dims import Weight
from modeling.dropout import ScoreDropout

STEEPEST = 8.0  # the steepest slope of n heads (a power of two) is 2 ** (-STEEPEST / n), the flattest 2 ** -STEEPEST


@dataclass(frozen=True)
class Alibi:
    """ALiBi (Press et al. 2022, arXiv:2108.12409): a score falls by its head's slope for each token of distance.

    The slopes are not trained: they follow from the number of the model's heads, ``n_heads``. ``heads`` are the heads
    whose slopes are meant; a rank that holds a part of them takes the slopes ``of_part``.
    """

    n_heads: int
    heads: range

    def of_part(self, rank: int, degree: int) -> "Alibi":
        """The slopes of part number ``rank`` of ``degree`` equal parts of the heads."""
        size = len(self.heads) // degree
        return Alibi(self.n_heads, self.heads[rank * size : (rank + 1) * size])

    def slopes(self, device: torch.device) -> Tensor:
        """How much each head's scores fall from one token to the one before it: fp32 (H,).

        The slopes are a geometric series. Where ``n_heads`` is not a power of two, the heads beyond the largest power
        below it take every other slope of the series for twice that power (the authors' code, as in Bloom).
        """
        power = 2 ** int(math.log2(self.n_heads))
        # Made on the device, since a copy would make the host wait; in fp64, so that the fp32 bits depend on the head
        # alone.
        head_H = torch.arange(self.heads.start, self.heads.stop, device=device, dtype=torch.float64)
        places_H = torch.where(head_H < power, head_H + 1, head_H - power + 0.5)
        return torch.exp2(places_H * (-STEEPEST / power)).float()

    def mask(self, mask_BQS: Tensor, query_positions_BQ: Tensor, key_positions_BS: Tensor) -> Tensor:
        """The mask that is added to the scores, fp32 (B, H, Q, S): minus slope times distance.

        It is -inf where ``mask_BQS`` hides a key from a query.
        """
        distance_BQS = query_positions_BQ[:, :, None] - key_positions_BS[:, None, :]
        slopes_H = self.slopes(mask_BQS.device)
        return (-slopes_H[:, None, None] * distance_BQS[:, None]).masked_fill_(~mask_BQS[:, None], float("-inf"))


@dataclass(frozen=True)
class Buckets:
    """T5's buckets of distances (Raffel et al.

    2020, arXiv:1910.10683, section 2.1), for attention to earlier tokens only.

    The first half of the ``count`` buckets are for one distance each. The others widen with the logarithm of the
    distance up to ``max_distance``; all distances from there on share the last one.
    """

    count: int
    max_distance: int

    def of(self, query_positions_BQ: Tensor, key_positions_BS: Tensor) -> Tensor:
        """The bucket of each query's distance to each key: int64 (B, Q, S).

        Keys after the query have the first bucket.
        """
        distance_BQS = (query_positions_BQ[:, :, None] - key_positions_BS[:, None, :]).clamp(min=0)
        n_exact = self.count // 2
        growth_BQS = torch.log(distance_BQS.clamp(min=1).float() / n_exact) / math.log(self.max_distance / n_exact)
        far_BQS = n_exact + (growth_BQS * (self.count - n_exact)).to(torch.int64)
        return torch.where(distance_BQS < n_exact, distance_BQS, far_BQS.clamp(max=self.count - 1))


def biased(mask_BQS: Tensor | None, bias_HN: Tensor, buckets_BQS: Tensor) -> Tensor:
    """The mask that is added to the scores, fp32 (B, H, Q, S): each head's bias, and -inf for hidden keys."""
    bias_BHQS = bias_HN[:, buckets_BQS].transpose(0, 1)
    return bias_BHQS if mask_BQS is None else bias_BHQS.masked_fill(~mask_BQS[:, None], float("-inf"))


def bucket_sums(dscores_BHQS: Tensor, buckets_BQS: Tensor, count: int) -> Tensor:
    """The bias's gradient, fp64 (H, N): each head's gradients by its scores, summed over the pairs in each bucket.

    Sums are made for each query first: ``scatter_add_`` is deterministic on GPUs (``torch.bincount`` is not), but adds
    the values of one place one after another, so it is fast only with many places.
    """

    def of_head(dscores_BQS: Tensor) -> Tensor:
        sums_BQN = dscores_BQS.new_zeros((*dscores_BQS.shape[:2], count), dtype=torch.float64)
        return sums_BQN.scatter_add_(2, buckets_BQS, dscores_BQS.double()).sum((0, 1))

    return torch.stack([of_head(dscores_BQS) for dscores_BQS in dscores_BHQS.unbind(1)])


class ScoreTerms(NamedTuple):
    """What attention does to the scores of the heads that it computes. A field that is None does nothing.

    Scores are first capped: ``cap`` times the tanh of the score over it (Gemma 2, arXiv:2408.00118, section 2). Then
    slopes or biases are added, and a sink joins the softmax. Dropout acts on the softmax's weights (Vaswani et al.
    2017), whose normalizer still includes the dropped ones.
    """

    alibi: Alibi | None = None
    sinks_H: Tensor | None = None  # fp32, a logit that joins each query's softmax and carries no value
    bias_HN: Tensor | None = None  # fp32, trained; added according to the bucket of the distance
    buckets: Buckets | None = None  # the buckets of ``bias_HN``
    cap: float | None = None
    dropout: ScoreDropout | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is done to scores and weights."""
        return self.alibi is None and self.sinks_H is None and not self.needs_formula

    @property
    def needs_formula(self) -> bool:
        """Whether attention must be computed by the plain formula instead of a fused kernel.

        Fused kernels do not return the scores' gradients, which a bias and a cap need, and do not drop weights by these
        masks.
        """
        return self.bias_HN is not None or self.cap is not None or self.dropout is not None

    def mask(self, mask_BQS: Tensor, query_positions_BQ: Tensor, key_positions_BS: Tensor) -> Tensor:
        """``mask_BQS``, or under ALiBi the fp32 mask with slopes that takes its place (``Alibi.mask``)."""
        return mask_BQS if self.alibi is None else self.alibi.mask(mask_BQS, query_positions_BQ, key_positions_BS)

    def buckets_of(self, query_positions_BQ: Tensor, key_positions_BS: Tensor) -> Tensor | None:
        """The bucket of each query's distance to each key (``Buckets.of``); None where there is no bias."""
        return None if self.buckets is None else self.buckets.of(query_positions_BQ, key_positions_BS)

    def factors(self, places_Q: Tensor, first_key: int, n_keys: int) -> Tensor | None:
        """The factor of each weight under dropout (``ScoreDropout.factors``); None where no weights are dropped."""
        return None if self.dropout is None else self.dropout.factors(places_Q, first_key, n_keys)


NO_TERMS = ScoreTerms()


class Sinks(nn.Module):
    """A trained logit for each head that joins each query's softmax, so that attention can go to no key at all.

    As in gpt-oss (arXiv:2508.10925, section 2.2); Xiao et al. 2023 (arXiv:2309.17453) explain why that helps.
    """

    def __init__(self, n_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))
        self.stated = {"weight": Weight(("per_head",))}

    def forward(self) -> Tensor:
        """sinks_H, fp32: a copy, since under ZeRO 3 the weight itself is whole only during this call."""
        return self.weight.to(torch.float32, copy=True)


class DistanceBias(nn.Module):
    """A trained bias for each head and bucket of distances (T5)."""

    def __init__(self, n_heads: int, n_buckets: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads, n_buckets))
        self.stated = {"weight": Weight(("per_head", "buckets"), is_table=True)}

    def forward(self) -> Tensor:
        """bias_HN, fp32: a copy, since under ZeRO 3 the weight itself is whole only during this call."""
        return self.weight.to(torch.float32, copy=True)
