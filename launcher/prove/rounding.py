"""How far rounding alone moves one process's results: where that exceeds a bound, no layout can be held to the bound.

A layout sums in another order than one process, so it rounds elsewhere. That moves a well conditioned model's gradients
by 1e-6 of their norm, and faults move them by far more; but in some models one unit in the last place of the weights
moves gradients by 1e-4, and over many steps all weights drift. So where a difference exceeds its bound, one process
repeats the steps with each weight of the model moved by one unit in the last place, up or down at random (Monte Carlo
arithmetic, D. S. Parker, UCLA CSD-970002, 1997, on inputs alone). This measure does not depend on the layout.

In 16 bits, differences are measured by one process's distance from fp32. For a loss, or for a tensor of a few numbers,
each a sum that nearly cancels, that distance may be small by chance. Then the process repeats the step, or for losses
all steps, with each weight rounded to 16 bits anew, up or down at random (stochastic rounding: M. Croci et al., R. Soc.
Open Sci. 9:211631, 2022, section 2).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from launcher.prove.compare.routing import StepChoices
from launcher.prove.plain import PlainRun, PlainState, PlainTrainer

# How many times as large as one process's error a layout's may be where rounding decides: both are draws of one
# distribution (sums are rounded elsewhere), and two draws rarely differ by a factor of three.
NOISE_FACTOR = 3.0
# Where one direction is badly conditioned, an error is one number from a normal distribution, so a draw may be small by
# chance: in one model of 400 the largest of eight draws is less than a third of another draw.
DRAWS = 8
NEXT = 1.01 * 2.0**-24  # moved by this share in fp64, a number rounds to its next neighbour in fp32, and never farther
MOST = 100  # times its bound: a tensor with a larger error is taken for faulty, without measuring what rounding does

Moves = Callable[[], Sequence[Mapping[str, float]]]  # how far nudging moves what is compared, by name, in each draw
Nudged = Callable[[], Sequence[Mapping[str, Tensor]]]  # the tensors that one process finds with its weights nudged


def nudge(model: nn.Module, seed: int) -> None:
    """Moves each fp32 weight to a neighbouring number, up or down by a coin of ``seed``; zeros stay."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            sign = torch.rand(weight.shape, generator=generator).sub_(0.5).sign()
            weight.copy_(weight.double() * (1 + NEXT * sign.double()))


@torch.no_grad()
def round_anew(model: nn.Module, masters: Mapping[str, Tensor], seed: int) -> None:
    """Rounds each fp32 master to one of its two neighbours in 16 bits, drawn from ``seed``, as the weight in ``model``.

    The nearer neighbour is the more likely, in proportion to the distances, so that the mean over draws is the master.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        master, info = masters[name], torch.finfo(weight.dtype)
        nearer = master.to(weight.dtype).float()
        missed = master - nearer
        _, exponent = torch.frexp(master)  # of a mantissa of 0.5 to 1
        unit = torch.ldexp(torch.full(weight.shape, info.eps), exponent - 1).clamp_(min=info.smallest_normal * info.eps)
        farther = torch.rand(weight.shape, generator=generator) < missed.abs() / unit
        weight.copy_(nearer + farther * unit * missed.sign())


def run_nudged(
    trainer: PlainTrainer, start: PlainState, steps: Sequence[tuple[np.ndarray, StepChoices]], draw: int
) -> PlainRun:
    """One process's run of ``steps`` (sample numbers and routers' choices) from ``start``, weights nudged before each.

    Only the model's weights are nudged. The masters move by the gradients alone.
    """
    trainer.load(start)
    for number, (samples, choices) in enumerate(steps):
        nudge(trainer.trainer.model, draw + DRAWS * number)
        trainer.step(samples, choices)
    return trainer.run


@dataclass(frozen=True)
class Bounds:
    """The bound of each tensor or step, by name, from how far nudged weights move it."""

    least: float  # the bound of all that nudging does not move farther
    moved: Mapping[str, float]  # the largest error over the draws; empty where nothing was nudged
    most: float = MOST  # times ``least``

    def of(self, name: str) -> float:
        """NOISE_FACTOR times as far as nudging moves it, at least ``least`` and at most ``most`` times ``least``."""
        return max(self.least, min(NOISE_FACTOR * self.moved.get(name, 0.0), self.most * self.least))

    def note(self, name: str) -> str:
        """Why the bound of ``name`` was raised; empty where it was not."""
        if self.of(name) == self.least:
            return ""
        return f"rounding alone moves it by {self.moved[name]:.1e} on one process"


def bounds_for(bound: float, errors: Mapping[str, float], moves: Moves | None, most: float = MOST) -> Bounds:
    """The bounds of ``errors``: ``bound`` for all, raised by what ``moves`` gives where some error exceeds it.

    ``moves`` is slow, so it is called only where the largest error lies between ``bound`` and ``most`` times that; a
    still larger one fails in any case.
    """
    if moves is None or not bound < max(errors.values()) <= most * bound:
        return Bounds(bound, {}, most)
    draws = moves()
    return Bounds(bound, {name: max(moved[name] for moved in draws) for name in draws[0]}, most)
