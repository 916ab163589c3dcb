"""The limit that a proof's small model clamps at is one that no value lies on."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from launcher.prove.kinks import KINK_GAP, TRIES, ClampWatch, clear_of_kinks, with_limit
from modeling.config import ModelConfig, MoEConfig
from modeling.kernels.experts import gated

MODEL = ModelConfig(moe=MoEConfig(swiglu_limit=2.0))


def gates(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


@pytest.mark.parametrize(
    ("values", "gap"), [((0.0, 1.0), 0.5), ((1.5, 2.5, 9.0), 0.25), ((2.0,), 0.0), ((), float("inf"))]
)
def test_watch_tells_the_nearest_gate(values: tuple[float, ...], gap: float) -> None:
    with ClampWatch() as watch:
        gated(gates(*values), gates(*[100.0 for _ in values]), 2.0)
    assert watch.gap == gap


def test_watch_sees_both_limits_of_a_value_and_no_clamp_without_a_gradient() -> None:
    with ClampWatch() as watch:
        gated(gates(-50.0), gates(-2.5), 2.0)
        torch.ones(3).clamp(max=1.0)
        gates(0.0).clamp(min=0)
    assert watch.gap == 0.25


def limit_of(model: ModelConfig) -> float:
    assert model.moe is not None and model.moe.swiglu_limit is not None
    return model.moe.swiglu_limit


@pytest.mark.parametrize("n_near", [0, 1, 5])
def test_limit_moves_off_the_values_that_lie_on_it(n_near: int) -> None:
    near = [limit_of(with_limit(MODEL, 1 + number / 64)) * (1 + KINK_GAP / 2) for number in range(n_near)]

    def run(model: ModelConfig) -> float:
        gated(gates(*near, 0.5), gates(*near, 0.5), limit_of(model))
        return limit_of(model)

    cleared = clear_of_kinks(MODEL, run)
    assert limit_of(cleared.model) == cleared.seen == 2.0 * (1 + n_near / 64)
    assert cleared.gap > KINK_GAP


def test_farthest_limit_is_taken_where_none_is_clear() -> None:
    tried: list[float] = []

    def run(model: ModelConfig) -> int:
        tried.append(limit_of(model))
        distance = KINK_GAP / (4 if len(tried) == 3 else 40)
        gated(gates(tried[-1] * (1 - distance)), gates(1.0), tried[-1])
        return len(tried)

    assert clear_of_kinks(MODEL, run).seen == 3
    assert len(tried) == TRIES


def test_model_without_a_limit_runs_once() -> None:
    runs: list[ModelConfig] = []
    model = replace(MODEL, moe=MoEConfig())
    assert clear_of_kinks(model, runs.append).model == model
    assert runs == [model]
