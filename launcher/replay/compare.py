"""Compares replayed steps with the recorded ones: bit for bit on the same layout, within bounds on another."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from launcher.prove.checks import LOSS_BOUND
from launcher.prove.rounding import MOST, NOISE_FACTOR, Bounds
from launcher.replay.plan import Plan
from launcher.replay.record import COMPARED, SAMPLES, Record
from modeling.dtypes import DTYPES
from modeling.kernels.cuts import E4M3
from modeling.precision_config import Precision, stored_as

ROUNDED = ("loss", "grad_norm")  # the numbers of a row that rounding changes
Numbers = Mapping[int, Mapping[str, float]]  # step -> each of ROUNDED

# In 16 bits, `roundtable prove` assumes that one process differs from fp32 by at least this fraction of the last bit.
FLOOR_SHARE = 1 / 64


@dataclass(frozen=True)
class Difference:
    """One number of a replayed step that differs from the recorded one by more than its bound."""

    step: int
    key: str
    recorded: Any
    replayed: Any
    bound: float  # relative; 0: bit for bit


@dataclass(frozen=True)
class StepVerdict:
    """The comparison of one replayed step: recorded and replayed numbers, the bounds, and the differences."""

    step: int
    exact: bool
    recorded: dict[str, Any]
    replayed: dict[str, Any]
    bounds: dict[str, float]
    moved: dict[str, float]  # relative change of each number by rounding alone; empty where it was not measured
    differences: tuple[Difference, ...]

    def as_json(self) -> dict[str, Any]:
        """The step's entry in the report's JSON; ``reproduced`` says whether there is no difference."""
        return asdict(self) | {"reproduced": not self.differences}


def bounds_of(precision: Precision, n_done: int) -> dict[str, float]:
    """Relative bounds for a replay on another layout, for the ``n_done``-th step after the checkpoint.

    They grow in proportion to ``n_done``, since rounding errors add up. In fp32, one step's bound for loss and gradient
    norm is that of `roundtable prove` for a loss. In 16 or 8 bits, a gradient norm may differ by NOISE_FACTOR times the
    precision's last bit, and a loss by FLOOR_SHARE of that. Learning rate and tokens must be equal.
    """
    loss = norm = LOSS_BOUND
    if precision != "fp32":
        last_bit = torch.finfo(E4M3 if precision == "fp8" else DTYPES[stored_as(precision)]).eps
        loss, norm = NOISE_FACTOR * last_bit * FLOOR_SHARE, NOISE_FACTOR * last_bit
    return {"loss": loss * n_done, "grad_norm": norm * n_done, "lr": 0.0, "tokens": 0.0}


def judge(
    plan: Plan,
    record: Record,
    rows: Mapping[int, tuple[Mapping[str, Any], Mapping[str, Any]]],
    moved: Numbers | None = None,
) -> list[StepVerdict]:
    """A verdict on each replayed step. ``rows``: step -> its metrics.jsonl row and its ledger.jsonl row.

    ``moved``: how far rounding alone moves each step's numbers (`launcher.replay.rounding`); None where that was not
    measured. It widens a number's bound to NOISE_FACTOR times that change, up to MOST times the bound.
    """
    found = []
    for n_done, (step, (row, samples)) in enumerate(sorted(rows.items()), 1):
        exact, of_step = plan.exact[step], dict(moved[step]) if moved is not None else {}
        bounds: dict[str, float] = (
            dict.fromkeys(COMPARED, 0.0) if exact else bounds_of(plan.config.train.precision, n_done)
        )
        bounds |= {key: Bounds(bounds[key], of_step).of(key) for key in ROUNDED}
        recorded = dict(record.updates[step].numbers)
        replayed = {key: row.get(key) for key in COMPARED}
        ledger = record.samples.get(step, {})
        pairs = [(key, recorded.get(key), replayed[key], bounds[key]) for key in COMPARED]
        pairs += [(key, ledger[key], samples[key], 0.0) for key in SAMPLES if key in ledger]
        wrong = [Difference(step, key, a, b, bound) for key, a, b, bound in pairs if not agree(a, b, bound)]
        found.append(StepVerdict(step, exact, recorded, replayed, bounds, of_step, tuple(wrong)))
    return found


def agree(recorded: Any, replayed: Any, bound: float) -> bool:
    """Whether two values are equal, or two finite numbers differ by at most ``bound`` times the recorded one."""
    if isinstance(recorded, float) and isinstance(replayed, float | int):
        if not (math.isfinite(recorded) and math.isfinite(replayed)):
            return recorded == replayed or (math.isnan(recorded) and math.isnan(replayed))
        return abs(recorded - replayed) <= bound * abs(recorded)
    return recorded == replayed


def rounding_may_decide(plan: Plan, verdicts: Sequence[StepVerdict]) -> bool:
    """Whether the steps' differences may be due to rounding alone, so that it is worth measuring its effect.

    That is so in fp32, where the only differences are in loss or gradient norm and none is beyond MOST times its
    bound. In fewer bits the bounds are so wide that no batch was seen to exceed them by rounding.
    """
    differences = [each for verdict in verdicts for each in verdict.differences]
    return (
        plan.config.train.precision == "fp32"
        and bool(differences)
        and all(each.key in ROUNDED and agree(each.recorded, each.replayed, MOST * each.bound) for each in differences)
    )


def rounding_notes(verdicts: Sequence[StepVerdict]) -> list[str]:
    """One line for each number whose bound was widened because rounding alone moves it that far."""
    return [
        f"step {each.step}: rounding alone moves {key} by {moved:.1e}, so its bound is {each.bounds[key]:.1e}"
        for each in verdicts
        for key, moved in each.moved.items()
        if not each.exact and moved * NOISE_FACTOR >= each.bounds[key]
    ]


def moved_by(base: Numbers, draws: Sequence[Numbers]) -> Numbers:
    """Each number's largest relative distance from ``base`` over all draws; 0 where a value is not finite."""
    return {
        step: {key: _farthest(value, [draw[step][key] for draw in draws]) for key, value in numbers.items()}
        for step, numbers in base.items()
    }


def _farthest(value: float, others: Sequence[float]) -> float:
    if not value or not all(map(math.isfinite, (value, *others))):
        return 0.0
    return max(abs(other - value) for other in others) / abs(value)
