"""How far two sets of logical tensors are apart, which differs first, and whether a plain factor explains it."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.decoder import ENTRY

NEGLIGIBLE = 1e-5  # a tensor whose norm is below this share of all tensors' norm is measured against that share
FACTOR_RESIDUAL = 1e-3  # "a plain factor": what is left after scaling, as a share of what the factor explains
FACTOR_NEARNESS = 1e-2  # how near a ratio must lie to a degree to be named after it

# Within a layer, tensors in the order in which the forward pass uses them.
_IN_LAYER = (
    "attention_norm",
    # of linear attention
    *(f"attention.in_{each}" for each in "qkvzab"),
    *(f"attention.{each}_taps" for each in "qkv"),
    "attention.log_rates",
    "attention.step_biases",
    "attention.norm",
    "attention.out.",
    "attention.q",  # and its norm
    "attention.k",
    "attention.v",
    "attention.sinks",
    "attention.distance_bias",
    "attention.o",
    "attention",
    "feed_forward_norm",
    "feed_forward.router",
    "feed_forward.experts.gate",
    "feed_forward.experts.up",
    "feed_forward.experts.down",
    "feed_forward.shared",
    "feed_forward",
)


@dataclass(frozen=True)
class Factor:
    """``ours`` = ratio x ``theirs`` by least squares; ``residual`` is what that leaves, relative to ``ours``."""

    ratio: float
    residual: float

    @property
    def is_plain(self) -> bool:
        """Whether the ratio alone explains the difference."""
        return self.residual <= FACTOR_RESIDUAL * abs(self.ratio - 1)


def tensor_errors(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """Each tensor's difference as a share of its own norm in ``theirs``, by name, in fp64.

    A tensor whose own norm is negligible (an expert that got no token; a router whose gradient cancels) is measured
    against NEGLIGIBLE times the norm of all together. Not finite on either side: infinite.
    """
    floor = NEGLIGIBLE * total_norm(theirs.values())
    errors = {}
    for name, reference in theirs.items():
        difference = norm(ours[name].double() - reference.double())
        scale = max(norm(reference), floor)
        error = difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def norm(tensor: Tensor) -> float:
    """The 2-norm, summed in fp64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The 2-norm of all tensors together."""
    return math.sqrt(sum(norm(tensor) ** 2 for tensor in tensors))


def execution_order(names: Iterable[str]) -> list[str]:
    """Logical tensors in the order in which the forward pass first uses them; a tied weight counts as the embedding."""
    return sorted(names, key=_place)


def _place(name: str) -> tuple[int, int, int, str]:
    match = re.match(r"(?:layers|mtp)\.(\d+)\.(.*)", name)
    if match is None:
        module = name.partition(".")[0]
        return (0, ENTRY.index(module), 0, "") if module in ENTRY else (2, 0 if "norm" in name else 1, 0, "")
    if name.startswith("mtp."):  # around the layer
        return 1, int(match[1]), len(_IN_LAYER) if match[2].startswith("final") else -1, match[2]
    inside = next(number for number, prefix in enumerate(_IN_LAYER) if match[2].startswith(prefix))
    alike = match[2] if match[2].startswith("attention.") else ""  # q before q_norm, q_a before q_b
    return (1, int(match[1]), inside, alike)


def factor(ours: Tensor, theirs: Tensor) -> Factor:
    """The factor that brings ``theirs`` nearest to ``ours`` by least squares.

    It is NaN, with an infinite residual, where ``theirs`` is zero or ``ours`` is not finite.
    """
    a, b = ours.double().flatten(), theirs.double().flatten()
    squares = float(b @ b)
    if squares == 0 or not bool(torch.isfinite(a).all()):
        return Factor(math.nan, math.inf)
    ratio = float(a @ b) / squares
    size = norm(a)
    return Factor(ratio, norm(a - ratio * b) / size if size else 0.0)


def name_ratio(ratio: float, degrees: Mapping[str, int]) -> str | None:
    """The degrees that a ratio equals, or their inverses: "dp, micro-batches of a rank" or "1/dp"; None for no match.

    ``degrees`` holds, by name, every number above one that could have been multiplied once too often.
    """
    names = [name for name, degree in degrees.items() if degree > 1 and near(ratio, degree)]
    names += [f"1/{name}" for name, degree in degrees.items() if degree > 1 and near(ratio, 1 / degree)]
    return " or ".join(names) or None


def near(value: float, other: float) -> bool:
    """Whether ``value`` lies within one percent of ``other``."""
    return abs(value - other) <= FACTOR_NEARNESS * abs(other)


def explain_norm(
    ours: float, gradients: Mapping[str, Tensor], groups: Mapping[str, list[str]], degrees: Mapping[str, int]
) -> str | None:
    """What the wrong gradient norm ``ours`` miscounts, as "TITLE counted N times"; None where nothing explains it.

    ``gradients`` are the true ones. For each group, each single tensor, and each count of 0, 2 or a degree, tries
    whether the norm is ``ours`` when those squares are counted that often. Of several, the nearest is taken.
    """
    squares = {name: norm(gradient) ** 2 for name, gradient in gradients.items()}
    total = sum(squares.values())
    surplus = ours**2 - total
    candidates = {**groups, **{name: [name] for name in gradients}}
    counts = {0, 2, *degrees.values()}
    best: tuple[float, str] | None = None
    for title, names in candidates.items():
        share = sum(squares[name] for name in names)
        for count in counts - {1}:
            wanted = (count - 1) * share
            miss = abs(surplus - wanted) / max(abs(surplus), 1e-300)
            if share > 0 and miss <= FACTOR_NEARNESS and (best is None or miss < best[0]):
                best = (miss, f"{title} counted {count} times")
    return None if best is None else best[1]
