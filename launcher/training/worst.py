"""Which logical tensor's gradient is to blame for a bad step, and where it lies: asked only when something is wrong."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel.zero.engine import Engine


@dataclass
class Held:
    """What one rank holds of one logical tensor: sums of squares, and gradient elements that are not finite."""

    gradient: float  # this rank's share; the loss scale divided out
    weight: float
    n_nonfinite: int
    n_counted: float = 0.0  # this rank's share of ``n_nonfinite``: of elements that several ranks hold, a part


@dataclass(frozen=True)
class Worst:
    """The tensor, and the rank that holds the worst of it, with its positions on the axes."""

    tensor: str
    place: str
    grad_norm: float
    weight_norm: float
    n_nonfinite: int  # elements of its gradient
    n_nonfinite_tensors: int


def worst_gradient(engine: Engine) -> Worst:
    """The gradient that is not finite, or else the one with the largest norm in proportion to its weight's.

    Of several that are not finite, the one nearest to the loss: from there the others got theirs. All ranks call it
    before the step's gradients are applied or dropped; they exchange four numbers for each tensor.
    """
    mine = (engine.mesh.place, held_sums(engine))
    everyone = [mine] * engine.mesh.world_size
    dist.all_gather_object(everyone, mine, group=engine.mesh.control)
    names = [name for name in engine.layout if any(name in held for _, held in everyone)]
    total = {name: add_up([held[name] for _, held in everyone if name in held]) for name in names}
    bad = [name for name in names if total[name].n_nonfinite]
    worst = bad[-1] if bad else max(names, key=lambda name: ratio(total[name]))

    def badness(row: tuple[str, dict[str, Held]]) -> tuple[int, float]:
        held = row[1].get(worst, Held(0.0, 0.0, 0))
        return held.n_nonfinite, 0.0 if bad else held.gradient

    place, _ = max(everyone, key=badness)
    held = total[worst]
    return Worst(worst, place, math.sqrt(held.gradient), math.sqrt(held.weight), held.n_nonfinite, len(bad))


@torch.no_grad()
def held_sums(engine: Engine) -> dict[str, Held]:
    """This rank's part of each logical tensor of which it holds some."""
    names = {id(weight): name for name, weight in engine.model.named_parameters()}
    found: dict[str, Held] = {}
    for parameter, gradient, share in engine.gradients():
        held = found.setdefault(names[id(parameter)], Held(0.0, 0.0, 0))
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) / engine.loss_scale
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
    """The whole tensor's, each element once. ``n_nonfinite`` is as many as one rank sees where fewer are counted.

    That is where copies differ, and one that does not count has elements that are not finite.
    """
    n_counted = sum(part.n_counted for part in parts)
    n_nonfinite = max(round(n_counted), *(part.n_nonfinite for part in parts))
    return Held(sum(part.gradient for part in parts), sum(part.weight for part in parts), n_nonfinite, n_counted)


def ratio(held: Held) -> float:
    """The gradient's norm over the weight's, squared; weights that are all zero come last among equals."""
    return held.gradient / max(held.weight, 1e-30)
