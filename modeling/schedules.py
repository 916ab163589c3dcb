"""Learning-rate schedules: a factor of the peak learning rate as a function of the step, counted from 1."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, assert_never

from annotated_types import Interval

Steps = Annotated[int, Interval(ge=0, le=10**10)]
Ratio = Annotated[float, Interval(ge=0, le=1)]


DecayShape = Literal["linear", "sqrt", "cosine"]


@dataclass(frozen=True, kw_only=True)
class CosineSchedule:
    """Linear warm-up, then half a cosine down to ``min_ratio`` of the peak at the last step."""

    name: Literal["cosine"] = "cosine"  # what becomes of the learning rate; wsd: warm-up, stable, decay
    warmup_steps: Steps = 0  # steps of linear warm-up
    min_ratio: Ratio = 0.1  # last learning rate over the peak


@dataclass(frozen=True, kw_only=True)
class WSDSchedule:
    """Warm-up, stable, decay over the last ``decay_steps`` to ``min_ratio`` (MiniCPM, arXiv:2404.06395)."""

    name: Literal["wsd"] = "wsd"
    warmup_steps: Steps = 0
    decay_steps: Steps = 0  # steps of decay at the end
    # what is left of the peak when a share p of the decay has passed, above min_ratio; linear: 1 - p;
    # sqrt: 1 - sqrt(p) (Haegele et al. 2024, arXiv:2405.18392, section 3); cosine: (1 + cos(pi p)) / 2
    decay_shape: DecayShape = "linear"
    min_ratio: Ratio = field(default=0.0, metadata={"usual": 0.1})


@dataclass(frozen=True, kw_only=True)
class ConstantSchedule:
    """Linear warm-up, then the peak for ever."""

    name: Literal["constant"] = "constant"
    warmup_steps: Steps = 0


ScheduleConfig = CosineSchedule | WSDSchedule | ConstantSchedule


def lr_factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """The factor by which update ``step`` (1..steps) multiplies the peak learning rate."""
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    match schedule:
        case CosineSchedule():
            progress = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
            return schedule.min_ratio + (1.0 - schedule.min_ratio) * half_cosine(min(1.0, progress))
        case WSDSchedule():
            left = steps - step  # updates after this one
            if left >= schedule.decay_steps:
                return 1.0
            left_over = decayed(schedule.decay_shape, max(0, left) / schedule.decay_steps)
            return schedule.min_ratio + (1.0 - schedule.min_ratio) * left_over
        case ConstantSchedule():
            return 1.0
        case _:
            assert_never(schedule)


def half_cosine(progress: float) -> float:
    """Half a cosine: falls from 1 to 0 as ``progress`` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def decayed(shape: DecayShape, share_left: float) -> float:
    """The share of the peak that is left, from 1 down to 0, when ``share_left`` of the decay is still to come."""
    match shape:
        case "linear":
            return share_left
        case "sqrt":
            return 1.0 - math.sqrt(1.0 - share_left)
        case "cosine":
            return half_cosine(1.0 - share_left)
        case _:
            assert_never(shape)
