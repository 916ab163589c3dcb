"""The seed of a proof is one with which no value lies where a clamp or a ReLU begins."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from launcher.config.tree import RunConfig
from launcher.prove.kinks import KINK_GAP, TRIES, KinkWatch, clear_of_kinks
from modeling.feed_forward import ACTIVATIONS
from modeling.kernels.experts import gated

CONFIG = RunConfig(seed=3)


def values(*numbers: float) -> Tensor:
    return torch.tensor(numbers, requires_grad=True)


@pytest.mark.parametrize(
    ("gates", "gap"), [((0.0, 1.0), 0.5), ((1.5, 2.5, 9.0), 0.25), ((2.0,), 0.0), ((), float("inf"))]
)
def test_watch_tells_the_nearest_gate(gates: tuple[float, ...], gap: float) -> None:
    with KinkWatch() as watch:
        gated(values(*gates), values(*[100.0 for _ in gates]), 2.0)
    assert watch.gap == gap


def test_watch_sees_both_limits_of_a_value_and_no_clamp_without_a_gradient() -> None:
    with KinkWatch() as watch:
        gated(values(-50.0), values(-2.5), 2.0)
        torch.ones(3).clamp(max=1.0)
        values(0.0).clamp(min=0)
    assert watch.gap == 0.25


@pytest.mark.parametrize("relu", [ACTIVATIONS["relu"], F.relu, torch.relu, Tensor.relu])
def test_watch_tells_how_near_a_relu_is_to_zero(relu) -> None:
    with KinkWatch() as watch:
        relu(values(3.0, -4.0, 12.0, 0.13))
    assert watch.gap == pytest.approx(0.13 / 6.5, rel=1e-3)


@pytest.mark.parametrize("square", [torch.square, Tensor.square])
def test_a_relu_that_is_squared_has_no_kink(square) -> None:
    """What was seen before it stays seen, and so does a ReLU whose square is taken of another tensor."""
    with KinkWatch() as watch:
        F.relu(values(3.0, 4.0, 0.5, -5.0))
        before = watch.gap
        square(F.relu(values(0.0, 1.0)))
        assert watch.gap == before < 0.2
        F.relu(values(0.0, 1.0))
        square(values(0.0))
    assert watch.gap == 0.0


def test_a_clamp_after_a_relu_is_watched() -> None:
    with KinkWatch() as watch:
        rectified = F.relu(values(1.0, 2.0))
        square_of_both = torch.square(rectified) + rectified.clamp(max=2.0)
    assert square_of_both.requires_grad and watch.gap == 0.0


def test_activations_without_a_kink_are_not_watched() -> None:
    with KinkWatch() as watch:
        for name, activation in ACTIVATIONS.items():
            activation(values(1.0 if name == "relu" else 0.0))
    assert watch.gap == 1.0


@pytest.mark.parametrize("n_near", [0, 1, 5])
def test_the_first_seed_without_a_value_on_a_kink_is_taken(n_near: int) -> None:
    def run(config: RunConfig) -> int:
        is_near = config.seed < CONFIG.seed + n_near
        gated(values(2.0 + (KINK_GAP / 2 if is_near else 0.1)), values(0.5), 2.0)
        return config.seed

    cleared = clear_of_kinks(CONFIG, run)
    assert cleared.config.seed == cleared.seen == CONFIG.seed + n_near
    assert cleared.gap > KINK_GAP


def test_the_seed_whose_values_stay_farthest_away_is_taken_where_none_is_clear() -> None:
    tried: list[int] = []

    def run(config: RunConfig) -> int:
        tried.append(config.seed)
        gated(values(2.0 * (1 - KINK_GAP / (4 if len(tried) == 3 else 40))), values(1.0), 2.0)
        return config.seed

    assert clear_of_kinks(CONFIG, run).config.seed == CONFIG.seed + 2
    assert tried == [CONFIG.seed + number for number in range(TRIES)]


def test_a_model_without_kinks_runs_once() -> None:
    runs: list[RunConfig] = []
    assert clear_of_kinks(CONFIG, runs.append).config == CONFIG
    assert runs == [CONFIG]
