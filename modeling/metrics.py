"""Metrics that a layer returns beside its output, and how micro-batches, ranks and layers combine them.

A layer returns them in a dataclass of scalar tensors. Each field's type declares its metric:

    z_loss: Annotated[Tensor, Metric("moe/z_loss", mean_over="tokens")]

Nothing else has to know of it: a declared metric is reduced over the ranks, and written to the terminal, metrics.jsonl
and W&B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_type_hints


@dataclass(frozen=True)
class Metric:
    """The name of one number of a layer in metrics.jsonl, and how a step's micro-batches and ranks combine it.

    A ``key`` with ``{layer}`` in it, as in "moe/layer_{layer:02d}/entropy", gives each layer an entry of its own;
    without, layers are combined as well. ``reduce`` is how: "sum" adds and "max" takes the largest value. ``mean_over``
    then divides the sum by the number of tokens, or of sequences, of the global batch. A layer's sum over tokens is
    over those that this rank routes; a sum over sequences is the same on all ranks that share the sequences (tp and
    cp).
    """

    key: str
    reduce: Literal["sum", "max"] = "sum"
    mean_over: Literal["tokens", "sequences"] | None = None


@cache
def metrics_of(stats: type, reduce: Literal["sum", "max"] | None = None) -> dict[str, Metric]:
    """The fields of dataclass ``stats`` that are metrics, in order: field name -> metric.

    ``reduce`` selects one kind.
    """
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
    """The keys and values of the layers' metrics in one row of metrics.jsonl.

    ``totals`` holds, for each metric and each layer, its sum or its largest value over the global batch, which has
    ``n_tokens`` routed tokens in ``n_sequences`` sequences. ``n_tokens`` is 0 where all documents are left out.
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
