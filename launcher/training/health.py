"""Detects bad steps (a loss or gradient that is not finite, a loss far above the last ones) and decides what to do.

All ranks judge by the same numbers, the all-reduced loss and gradient norm, and so come to the same decision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, assert_never

import numpy as np

from launcher.config.tree import HealthConfig
from launcher.training.samples import Samples
from launcher.training.state import TrainState
from launcher.training.worst import worst_gradient
from parallel.zero.engine import Engine

Kind = Literal["nonfinite", "spike"]
Action = Literal["report", "skip", "rollback", "stop"]

MAD_TO_DEVIATION = 1.4826  # of a normal distribution
LEAST_DEVIATION = 1e-3  # times the median: among losses that hardly differ, a small rise is no spike

UNHEALTHY = 3  # exit code: health stopped the run, and the same start would meet the same batch


class Unhealthy(Exception):
    """Raised on all ranks where health stops the run; the message is one line for the user."""

    exit_code = UNHEALTHY


class OutOfData(Unhealthy):
    """Raised on all ranks where the data end before train.steps, which can happen after rollbacks left samples out."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """What is wrong with a step, and the action to be taken; the same on all ranks."""

    kind: Kind
    action: Action
    z: float | None  # a spike's robust z-score (``robust_z``); None for other kinds
    limit: str | None = None  # the key below health whose limit turned the action into a stop


class Health:
    """Judges each step before its update, and counts consecutive skips, and rollbacks since this start.

    Every update that is made, even that of a reported spike, resets the count of skips. A step that the fp16 loss
    scaler skips is not judged and leaves the count as it is.
    """

    def __init__(self, config: HealthConfig) -> None:
        self.config = config
        self.skips = 0
        self.rollbacks = 0
        self.told_of_no_targets = False

    def judge(self, loss: float, grad_norm: float, losses: Sequence[float]) -> Problem | None:
        """The problem of a step with this loss and norm, after updates with these ``losses``; None if healthy."""
        window = losses[-self.config.spike_window :]  # a checkpoint may hold those of a longer one
        z = robust_z(loss, window) if len(window) == self.config.spike_window else 0.0
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self.limited(Problem("nonfinite", self.config.on_nonfinite, None))
        if z > self.config.spike_z:
            return self.limited(Problem("spike", self.config.on_spike, z))
        self.skips = 0
        return None

    def limited(self, problem: Problem) -> Problem:
        """The problem, with its action counted, and turned into a stop where skips or rollbacks exceed their limit."""
        match problem.action:
            case "report":
                self.skips = 0
            case "skip":
                self.skips += 1
                if self.skips > self.config.max_skips:
                    return Problem(problem.kind, "stop", problem.z, "max_skips")
            case "rollback":
                self.rollbacks += 1
                if self.rollbacks > self.config.max_rollbacks:
                    return Problem(problem.kind, "stop", problem.z, "max_rollbacks")
            case "stop":
                pass
            case _:
                assert_never(problem.action)
        return problem


def robust_z(loss: float, losses: Sequence[float]) -> float:
    """How many deviations ``loss`` lies above the median of ``losses``, the deviation taken from their MAD.

    The MAD is the median absolute deviation: neither a few spikes nor a slow fall of the losses changes it much.
    """
    middle = median(losses)
    deviation = MAD_TO_DEVIATION * median(abs(each - middle) for each in losses)
    return (loss - middle) / max(deviation, LEAST_DEVIATION * abs(middle), 1e-12)


def examine(
    health: Health | None,
    engine: Engine,
    dataset: Samples,
    indices: np.ndarray,
    state: TrainState,
    loss: float,
) -> dict[str, Any] | None:
    """The event of an unhealthy step, with its ``action``; None for a healthy one. All ranks call it.

    Call it between the last backward pass and the update of the step whose samples are ``indices`` and whose mean loss
    is ``loss``. An fp16 overflow is no event while the loss scale can still be lowered: the scaler skips the update.
    """
    if health is None:
        return None
    grad_norm = engine.measure()
    if engine.can_lower_loss_scale and not math.isfinite(grad_norm):
        return None
    problem = health.judge(loss, grad_norm, state.losses)
    return describe(problem, state.step + 1, loss, grad_norm, engine, dataset, indices) if problem else None


def tell_of_no_targets(
    health: Health | None, dataset: Samples, indices: np.ndarray, step: int
) -> dict[str, Any] | None:
    """The event of the first step whose batch ``indices`` holds no target that counts; None for later such steps.

    Such a step is no sign of bad health: it is neither judged nor counted by health.max_skips.
    """
    if health is None or health.told_of_no_targets:
        return None
    health.told_of_no_targets = True
    row: dict[str, Any] = {"step": step, "event": "no_targets", "split": "train", "action": "skip"}
    row |= {"first_sample": int(indices[0]), "last_sample": int(indices[-1])}
    return row | {"documents": dataset.documents(indices)}


def describe(
    problem: Problem, step: int, loss: float, grad_norm: float, engine: Engine, dataset: Samples, indices: np.ndarray
) -> dict[str, Any]:
    """The event's fields, with the worst gradient and the documents of the batch.

    All ranks call it, before the step's gradients are applied or dropped.
    """
    worst = worst_gradient(engine)
    row: dict[str, Any] = {"step": step, "event": problem.kind, "action": problem.action}
    if problem.limit is not None:
        row["limit"] = f"health.{problem.limit}"
    row |= {"batch_loss": loss, "grad_norm": grad_norm}
    if problem.z is not None:
        row["z"] = problem.z
    row |= {"tensor": worst.tensor, "place": worst.place, "tensor_grad_norm": worst.grad_norm}
    row |= {"tensor_weight_norm": worst.weight_norm, "n_nonfinite": worst.n_nonfinite}
    row |= {"n_nonfinite_tensors": worst.n_nonfinite_tensors}
    row |= {"first_sample": int(indices[0]), "last_sample": int(indices[-1])}
    return row | {"documents": dataset.documents(indices)}


def stop_line(event: dict[str, Any]) -> str:
    """The line that tells the user why health stops the run."""
    limit = f", with {event['limit']} used up" if "limit" in event else ""
    what = f"the loss is {event['batch_loss']:g} and the gradient norm {event['grad_norm']:g}"
    worst = f"the worst gradient is that of {event['tensor']} on {event['place']}"
    return (
        f"stopped at step {event['step']} by health.on_{event['event']}{limit}: {what}; {worst}; the step is not "
        "saved, and metrics.jsonl names its documents"
    )
