"""Learning-rate schedules, update by update, by the numbers that their definitions give."""

import math

import pytest

from modeling.schedules import ConstantSchedule, CosineSchedule, ScheduleConfig, WSDSchedule, lr_factor

ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (CosineSchedule(min_ratio=0.0), [(1 + math.cos(math.pi * step / 6)) / 2 for step in range(1, 7)]),
        (CosineSchedule(warmup_steps=2, min_ratio=0.2), [0.5, 1, 0.6 + 0.4 * ROOT, 0.6, 0.6 - 0.4 * ROOT, 0.2]),
        (CosineSchedule(warmup_steps=6), [1 / 6, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1]),
        (WSDSchedule(warmup_steps=2, decay_steps=2, min_ratio=0.2), [0.5, 1, 1, 1, 0.6, 0.2]),
        (WSDSchedule(decay_steps=6), [5 / 6, 2 / 3, 1 / 2, 1 / 3, 1 / 6, 0]),
        (WSDSchedule(decay_steps=4, decay_shape="sqrt"), [1, 1, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0]),
        (
            WSDSchedule(decay_steps=4, min_ratio=0.2, decay_shape="cosine"),
            [1, 1, 0.6 + 0.4 * 0.5**0.5, 0.6, 0.6 - 0.4 * 0.5**0.5, 0.2],
        ),
        (WSDSchedule(warmup_steps=3), [1 / 3, 2 / 3, 1, 1, 1, 1]),
        (ConstantSchedule(), [1, 1, 1, 1, 1, 1]),
        (ConstantSchedule(warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1]),
    ],
    ids=str,
)
def test_each_update_has_its_factor(schedule: ScheduleConfig, factors: list[float]) -> None:
    assert [lr_factor(schedule, step, 6) for step in range(1, 7)] == pytest.approx(factors, abs=1e-12)
