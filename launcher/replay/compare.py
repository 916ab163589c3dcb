"""Whether the executed steps are those that were recorded: bit for bit on one layout, within bounds on another."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from launcher.prove.checks import LOSS_BOUND
from launcher.prove.rounding import NOISE_FACTOR
from launcher.replay.plan import Plan
from launcher.replay.record import COMPARED, SAMPLES, Record
from modeling.dtypes import DTYPES
from modeling.kernels.cuts import E4M3
from modeling.precision_config import Precision, stored_as

# In 16 bits `roundtable prove` takes this share of the precision's last bit as one process's least distance from fp32.
FLOOR_SHARE = 1 / 64


@dataclass(frozen=True)
class Difference:
    """One number that did not come out as it was recorded."""

    step: int
    key: str
    recorded: Any
    replayed: Any
    bound: float  # relative; 0: bit for bit


@dataclass(frozen=True)
class StepVerdict:
    """One executed step: what was recorded, what came out, and the bounds it was held to."""

    step: int
    exact: bool
    recorded: dict[str, Any]
    replayed: dict[str, Any]
    bounds: dict[str, float]
    differences: tuple[Difference, ...]

    def as_json(self) -> dict[str, Any]:
        """What the report's JSON holds of the step."""
        return asdict(self) | {"reproduced": not self.differences}


def bounds_of(precision: Precision, n_done: int) -> dict[str, float]:
    """Relative bounds on another layout, ``n_done`` steps after the checkpoint: rounding errors add up.

    In fp32 the proof's for a loss and a norm. In 16 or 8 bits a loss may be NOISE_FACTOR times the proof's least noise
    away, and a norm as often the precision's last bit.
    """
    loss = norm = LOSS_BOUND
    if precision != "fp32":
        last_bit = torch.finfo(E4M3 if precision == "fp8" else DTYPES[stored_as(precision)]).eps
        loss, norm = NOISE_FACTOR * last_bit * FLOOR_SHARE, NOISE_FACTOR * last_bit
    return {"loss": loss * n_done, "grad_norm": norm * n_done, "lr": 0.0, "tokens": 0.0}


def judge(
    plan: Plan, record: Record, rows: Mapping[int, tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> list[StepVerdict]:
    """A verdict on each executed step. ``rows``: step -> its row as metrics.jsonl has it, and as ledger.jsonl does."""
    found = []
    for n_done, (step, (row, samples)) in enumerate(sorted(rows.items()), 1):
        exact = plan.exact[step]
        bounds: dict[str, float] = (
            dict.fromkeys(COMPARED, 0.0) if exact else bounds_of(plan.config.train.precision, n_done)
        )
        recorded = dict(record.updates[step].numbers)
        replayed = {key: row.get(key) for key in COMPARED}
        ledger = record.samples.get(step, {})
        pairs = [(key, recorded.get(key), replayed[key], bounds[key]) for key in COMPARED]
        pairs += [(key, ledger[key], samples[key], 0.0) for key in SAMPLES if key in ledger]
        wrong = [Difference(step, key, a, b, bound) for key, a, b, bound in pairs if not agree(a, b, bound)]
        found.append(StepVerdict(step, exact, recorded, replayed, bounds, tuple(wrong)))
    return found


def agree(recorded: Any, replayed: Any, bound: float) -> bool:
    """Whether two values are equal, or two numbers within ``bound`` of the recorded one's size."""
    if isinstance(recorded, float) and isinstance(replayed, float | int):
        if not (math.isfinite(recorded) and math.isfinite(replayed)):
            return recorded == replayed or (math.isnan(recorded) and math.isnan(replayed))
        return abs(recorded - replayed) <= bound * abs(recorded)
    return recorded == replayed
