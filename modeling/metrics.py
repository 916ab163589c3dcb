"""Numbers that a layer tells of a forward pass besides its output: how passes, ranks and layers combine them.

A layer returns them in a dataclass of scalar tensors, and each field's type says what becomes of it in metrics.jsonl:

    z_loss: Annotated[Tensor, Metric("moe/z_loss", mean_over="tokens")]

Nothing else has to know of a metric: ranks exchange, and the terminal, metrics.jsonl and W&B get, what is declared so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_type_hints


@dataclass(frozen=True)
class Metric:
    """What becomes of one number of a layer over the micro-batches and ranks of a step.

    ``key`` is its name in metrics.jsonl: with ``{layer}`` in it, as in "moe/layer_{layer:02d}/entropy", each layer has
    its own; without, the layers are combined too. ``reduce`` is how, in either case: "sum" adds and "max" takes the
    largest. ``mean_over`` divides the sum by so many tokens or sequences of the whole global batch. A sum over tokens
    is of those that this rank routes; one over sequences is the same on all ranks that share them (tp and cp).
    """

    key: str
    reduce: Literal["sum", "max"] = "sum"
    mean_over: Literal["tokens", "sequences"] | None = None


@cache
def metrics_of(stats: type, reduce: Literal["sum", "max"] | None = None) -> dict[str, Metric]:
    """Field to metric of each field of dataclass ``stats`` that is one, in order; of one way to reduce, or of all."""
    hints = get_type_hints(stats, include_extras=True)
    declared = [(name, each) for name, hint in hints.items() for each in getattr(hint, "__metadata__", ())]
    found = {name: each for name, each in declared if isinstance(each, Metric)}
    return {name: metric for name, metric in found.items() if reduce in (None, metric.reduce)}


def logged(
    metrics: Mapping[str, Metric],
    totals: Mapping[str, Mapping[int, float]],
    *,
    n_tokens: int,
    n_sequences: int,
) -> dict[str, float]:
    """The keys and values for a row of metrics.jsonl.

    ``totals`` holds for each metric and each layer its sum, or its largest value, over the whole global batch, of
    ``n_tokens`` routed tokens in ``n_sequences`` sequences; where all documents are left out there are no tokens.
    """
    row = {}
    divisors = {None: 1, "tokens": max(1, n_tokens), "sequences": n_sequences}
    for name, metric in metrics.items():
        values: dict[str, list[float]] = {}
        for layer in sorted(totals[name]):
            values.setdefault(metric.key.format(layer=layer), []).append(totals[name][layer])
        combine = sum if metric.reduce == "sum" else max
        row |= {key: combine(each) / divisors[metric.mean_over] for key, each in values.items()}
    return row
