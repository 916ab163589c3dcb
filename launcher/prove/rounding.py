"""How far rounding alone moves one process: where that is farther than a bound, no layout can be held to the bound.

A layout's sums are other sums, so it rounds elsewhere. A well conditioned model's gradients move by 1e-6 of their norm
then, and faults by far more; but there are models where a unit in the last place of the weights moves them by 1e-4, and
over many steps all weights drift. So a difference beyond its bound is held against one process that repeats the steps
with each weight of the model moved by one unit in the last place, up or down at random (Monte Carlo arithmetic, D. S.
Parker, UCLA CSD-970002, 1997, on inputs alone). Nothing of the layout is asked for that.

In 16 bits one process's distance from fp32 is the measure, but of a loss, or of a tensor of a few numbers, each a sum
that nearly cancels, it may be small by chance. There the process repeats the step, or for losses all steps, with each
weight rounded to 16 bits anew, up or down at random (stochastic rounding: M. Croci et al., R. Soc. Open Sci. 9:211631,
2022, section 2).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from launcher.prove.compare.routing import StepChoices
from launcher.prove.plain import PlainRun, PlainState, PlainTrainer

# How often as far as one process the layout may be where rounding decides: its errors are as large, but others (sums
# are rounded elsewhere), and two draws of one distribution rarely differ by three.
NOISE_FACTOR = 3.0
# Where one direction is badly conditioned an error is one number of a normal distribution, so a draw may be small by
# chance: of eight the largest is, in one model of 400, less than a third of another draw.
DRAWS = 8
NEXT = 1.01 * 2.0**-24  # of a number, in fp64: it is rounded to the next in fp32 from there, and never to the one after
MOST = 100  # times its bound: a tensor that is farther off is not one that rounding moved

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
    """Rounds each fp32 master to its 16-bit weight in ``model`` up or down by a coin of ``seed``.

    The nearer of the two is the likelier by as much as it is nearer, so the mean is the master.
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
    """The steps, each of sample numbers and routers' choices, from ``start``, with weights nudged before each.

    The masters are not moved: of them is told what gradients make.
    """
    trainer.load(start)
    for number, (samples, choices) in enumerate(steps):
        nudge(trainer.trainer.model, draw + DRAWS * number)
        trainer.step(samples, choices)
    return trainer.run


@dataclass(frozen=True)
class Bounds:
    """What each tensor or step is held to, and how far nudging moved it, by name. Empty where nothing was nudged."""

    least: float  # of all of them
    moved: Mapping[str, float]
    most: float = MOST  # times ``least``

    def of(self, name: str) -> float:
        """``least``, or NOISE_FACTOR times as far as nudging moves it, where that is more; at most ``most`` times."""
        return max(self.least, min(NOISE_FACTOR * self.moved.get(name, 0.0), self.most * self.least))

    def note(self, name: str) -> str:
        """Why its bound is not the least one."""
        if self.of(name) == self.least:
            return ""
        return f"rounding alone moves it by {self.moved[name]:.1e} on one process"


def bounds_for(bound: float, errors: Mapping[str, float], moves: Moves | None, most: float = MOST) -> Bounds:
    """``bound`` for all, unless the largest of ``errors`` is beyond it, but not ``most`` times as large."""
    if moves is None or not bound < max(errors.values()) <= most * bound:
        return Bounds(bound, {}, most)
    draws = moves()
    return Bounds(bound, {name: max(moved[name] for moved in draws) for name in draws[0]}, most)
