"""Learning-rate schedules: a factor of the peak learning rate as a function of the step, counted from 1."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal, assert_never

from annotated_types import Interval

Steps = Annotated[int, Interval(ge=0, le=10**10)]
Ratio = Annotated[float, Interval(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class CosineSchedule:
    """Linear warm-up, then half a cosine down to ``min_ratio`` of the peak at the last step."""

    name: Literal["cosine"] = "cosine"  # what becomes of the learning rate; wsd: warm-up, stable, decay
    warmup_steps: Steps = 0  # steps of linear warm-up
    min_ratio: Ratio = 0.1  # last learning rate over the peak


@dataclass(frozen=True, kw_only=True)
class WSDSchedule:
    """Warm-up, stable, linear decay over the last ``decay_steps`` to ``min_ratio`` (MiniCPM, arXiv:2404.06395)."""

    name: Literal["wsd"] = "wsd"
    warmup_steps: Steps = 0
    decay_steps: Steps = 0  # steps of linear decay at the end
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
            cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
            return schedule.min_ratio + (1.0 - schedule.min_ratio) * cosine
        case WSDSchedule():
            left = steps - step  # updates after this one
            if left >= schedule.decay_steps:
                return 1.0
            return schedule.min_ratio + (1.0 - schedule.min_ratio) * max(0, left) / schedule.decay_steps
        case ConstantSchedule():
            return 1.0
        case _:
            assert_never(schedule)
