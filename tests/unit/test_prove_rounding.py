"""How far rounding alone moves one process, and what a layout is held to where that is farther than a bound."""

import math
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from launcher.prove.checks import check_series, check_tensors
from launcher.prove.compare.boxes import TensorBox
from launcher.prove.rounding import MOST, NOISE_FACTOR, Bounds, bounds_for, nudge
from parallel.checkpoint.boxes import Box

BOUND = 1e-5


def test_each_weight_moves_to_a_neighbor() -> None:
    model = nn.Linear(40, 30)
    model.weight.data[0] = 2.0 ** torch.arange(-20, 20)  # where the numbers below lie twice as near
    model.weight.data[1] = -model.weight.data[0]
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    nudge(model, 3)
    for name, weight in model.named_parameters():
        up, down = (
            weight.detach().isclose(torch.nextafter(before[name], torch.tensor(side)), 0, 0)
            for side in (math.inf, -math.inf)
        )
        assert bool((up ^ down).all()) and 0.3 < float(up.float().mean()) < 0.7
    zero = nn.Linear(2, 2)
    nn.init.zeros_(zero.weight)
    nudge(zero, 0)
    assert not zero.weight.any()
    once = [weight.detach().clone() for weight in model.parameters()]
    for seed, is_same in ((3, True), (4, False)):
        for name, weight in model.named_parameters():
            weight.data.copy_(before[name])
        nudge(model, seed)
        assert all(torch.equal(weight, each) for weight, each in zip(model.parameters(), once, strict=True)) == is_same


def not_asked() -> Sequence[Mapping[str, float]]:
    raise AssertionError("nothing is nudged where no error lies where rounding may bring it")


@pytest.mark.parametrize("worst", [0.0, BOUND, 1.01 * MOST * BOUND, float("inf"), float("nan")])
def test_nothing_is_nudged_where_rounding_decides_nothing(worst: float) -> None:
    bounds = bounds_for(BOUND, {"a": BOUND / 2, "b": worst}, not_asked)
    assert bounds.of("a") == bounds.of("b") == BOUND and bounds.note("b") == ""


def test_a_tensor_is_held_to_the_largest_of_the_draws() -> None:
    draws = [{"a": 1e-6, "b": 2e-5, "c": 1.0}, {"a": 2e-6, "b": 1e-5, "c": 0.5}]
    bounds = bounds_for(BOUND, {"a": 0.0, "b": 2 * BOUND, "c": 0.0}, lambda: draws)
    assert bounds == Bounds(BOUND, {"a": 2e-6, "b": 2e-5, "c": 1.0})
    assert [bounds.of(name) for name in "abc"] == [BOUND, NOISE_FACTOR * 2e-5, MOST * BOUND]
    assert bounds.note("a") == "" and bounds.note("b") == "rounding alone moves it by 2.0e-05 on one process"


def pieces(**errors: float) -> list[TensorBox]:
    return [TensorBox(name, Box((0,), (4,)), torch.full((4,), 1.0 + error)) for name, error in errors.items()]


def ones(**errors: float) -> dict[str, Tensor]:
    return {name: torch.full((4,), 1.0 + error) for name, error in errors.items()}


def test_planted_error_beyond_rounding_is_seen_beside_one_within() -> None:
    theirs = ones(a=0.0, b=0.0)
    nudged = [ones(a=2e-4, b=0), ones(a=-3e-4, b=0)]
    within = check_tensors("p", "gradients", pieces(a=5e-4, b=5e-6), theirs, BOUND, nudged=lambda: nudged)
    assert within.passed and within.worst == "a" and within.bound == pytest.approx(9e-4, rel=1e-2)
    assert within.note == "rounding alone moves it by 3.0e-04 on one process"
    assert not check_tensors("p", "gradients", pieces(a=5e-4, b=5e-6), theirs, BOUND).passed
    other = check_tensors("p", "gradients", pieces(a=5e-4, b=2e-5), theirs, BOUND, nudged=lambda: nudged)
    assert not other.passed and (other.worst, other.bound, other.note) == ("b", BOUND, "")
    farther = check_tensors("p", "gradients", pieces(a=9.7e-4, b=0.0), theirs, BOUND, nudged=lambda: nudged)
    assert not farther.passed and farther.worst == "a"
    copy = [*pieces(a=0.0, b=0.0), TensorBox("b", Box((0,), (2,)), torch.full((2,), 1 + 1e-4), False)]
    wrong = check_tensors("p", "gradients", copy, theirs, BOUND, nudged=lambda: nudged)
    assert not wrong.passed and wrong.worst == "a copy of b"


def test_planted_step_beyond_rounding_is_seen() -> None:
    theirs, nudged = [1.0, 1.0, 1.0], [[1.0, 1 + 1e-6, 1 - 2e-5], [1.0, 1 + 2e-6, 1.0]]
    within = check_series("p", "norm", [1.0, 1 + 5e-6, 1 + 5e-5], theirs, nudged=lambda: nudged)
    assert within.passed and within.worst == "step 3" and "by 2.0e-05 on one process" in within.note
    beyond = check_series("p", "norm", [1.0, 1 + 7e-6, 1 + 5e-5], theirs, nudged=lambda: nudged)
    assert not beyond.passed and beyond.worst == "step 2" and "one process 1" in beyond.note
