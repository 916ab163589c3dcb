"""The logical tensor whose gradient is most likely to blame for a bad step, and the rank that holds it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel.zero.engine import Engine


@dataclass
class Held:
    """One rank's part of one logical tensor: sums of squares, and counts of gradient elements that are not finite."""

    gradient: float  # sum of squares of this rank's share of the gradient, without the loss scale
    weight: float  # sum of squares of the weights that this rank owns
    n_nonfinite: int  # gradient elements on this rank that are not finite
    n_counted: float = 0.0  # this rank's share of ``n_nonfinite``: an element on several ranks counts in part on each


@dataclass(frozen=True)
class Worst:
    """The tensor with the worst gradient, and the rank, by its place on the axes, that holds the worst part of it."""

    tensor: str
    place: str
    grad_norm: float
    weight_norm: float
    n_nonfinite: int  # elements of its gradient
    n_nonfinite_tensors: int


def worst_gradient(engine: Engine) -> Worst:
    """The gradient that is not finite, or else the one with the largest norm in proportion to its weight's.

    Of several that are not finite it is the one nearest to the loss, since the backward pass spreads them from there.
    All ranks call it before the step's gradients are applied or dropped; they exchange four numbers for each tensor.
    """
    mine = (engine.mesh.place, held_sums(engine))
    everyone = [mine] * engine.mesh.world_size
    dist.all_gather_object(everyone, mine, group=engine.mesh.control)
    names = [name for name in engine.layout if any(name in held for _, held in everyone)]
    total = {name: add_up([held[name] for _, held in everyone if name in held]) for name in names}
    bad = [name for name in names if total[name].n_nonfinite]
    worst = bad[-1] if bad else largest(total, {name: math.prod(engine.layout[name].shape) for name in names})

    def badness(row: tuple[str, dict[str, Held]]) -> tuple[int, float]:
        held = row[1].get(worst, Held(0.0, 0.0, 0))
        return held.n_nonfinite, 0.0 if bad else held.gradient

    place, _ = max(everyone, key=badness)
    held = total[worst]
    return Worst(worst, place, math.sqrt(held.gradient), math.sqrt(held.weight), held.n_nonfinite, len(bad))


@torch.no_grad()
def held_sums(engine: Engine) -> dict[str, Held]:
    """Logical tensor's name -> this rank's part of it, for the tensors of which it holds any."""
    names = {id(weight): name for name, weight in engine.model.named_parameters()}
    found: dict[str, Held] = {}
    for parameter, gradient, share in engine.gradients():
        held = found.setdefault(names[id(parameter)], Held(0.0, 0.0, 0))
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) / engine.gradient_scale
        held.gradient += norm * norm * share
        n_nonfinite = int((~torch.isfinite(gradient)).sum())
        held.n_nonfinite += n_nonfinite
        held.n_counted += n_nonfinite * share
    for fragment in engine.fragments:
        if fragment.is_owner:
            held = found.setdefault(fragment.name, Held(0.0, 0.0, 0))
            held.weight += float(torch.linalg.vector_norm(engine.pieces(fragment)["weight"], dtype=torch.float64)) ** 2
    return found


def add_up(parts: list[Held]) -> Held:
    """The numbers of the whole tensor, with each element counted once.

    ``n_nonfinite`` is at least what any one rank sees: where copies differ, a copy that does not count may be the one
    with elements that are not finite.
    """
    n_counted = sum(part.n_counted for part in parts)
    n_nonfinite = max(round(n_counted), *(part.n_nonfinite for part in parts))
    return Held(sum(part.gradient for part in parts), sum(part.weight for part in parts), n_nonfinite, n_counted)


def largest(total: Mapping[str, Held], n_elements: Mapping[str, int]) -> str:
    """The tensor with the largest norm of its gradient in proportion to its weight's norm; all numbers are finite.

    A weight whose root mean square is below that of all weights together counts as if it had that one. Otherwise a
    bias that started at zero would be named whatever its gradient.
    """
    usual = sum(held.weight for held in total.values()) / sum(n_elements.values())  # mean square of all elements

    def ratio(name: str) -> float:
        return total[name].gradient / max(total[name].weight, usual * n_elements[name], 1e-30)

    return max(total, key=ratio)
