"""How far rounding alone moves one process, and what a layout is held to where that is farther than a bound."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from launcher.prove.checks import Check, check_series, check_tensors
from launcher.prove.compare.boxes import TensorBox
from launcher.prove.noise_checks import MOST_NOISE, check_noisy_gradients, check_noisy_heldout, check_noisy_losses
from launcher.prove.rounding import MOST, NOISE_FACTOR, Bounds, bounds_for, nudge, round_anew
from parallel.checkpoint.boxes import Box

BOUND = 1e-5


def test_each_weight_moves_to_a_neighbor() -> None:
    model = nn.Linear(40, 300)  # so many that chance leaves no share of them
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_up_or_down_by_how_near_they_are(dtype: torch.dtype) -> None:
    """A quarter of a unit above a number: one in four goes up. Numbers that 16 bits hold, and zero, stay."""
    info = torch.finfo(dtype)
    model = nn.Linear(4000, 5, bias=False, dtype=dtype)
    below = torch.tensor([1.5, -1.5, 2.0**-10 * (1 + info.eps), info.smallest_normal / 4, 0.0])
    units = torch.tensor([1.0, -1.0, 2.0**-10, info.smallest_normal, 0.0]) * info.eps
    masters = (below + units / 4)[:, None].expand(5, 4000).contiguous()
    round_anew(model, {"weight": masters}, 3)
    up = model.weight.float() == (below + units)[:, None]
    assert bool((up | (model.weight.float() == below[:, None])).all())
    assert all(0.2 < float(share) < 0.3 for share in up[:-1].float().mean(1))
    once = model.weight.detach().clone()
    for seed, is_same in ((3, True), (4, False)):
        round_anew(model, {"weight": masters}, seed)
        assert torch.equal(model.weight, once) == is_same
    round_anew(model, {"weight": once.float()}, 5)
    assert torch.equal(model.weight, once)


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


def test_planted_gradient_beyond_what_rounding_in_16_bits_moves_is_seen() -> None:
    """The noise of ``b`` is small by chance; drawn again it is larger. What is farther off than that fails."""
    exact = ones(**dict.fromkeys("abcd", 0.0))
    low = ones(a=0.01, b=0.001, c=0.01, d=0.01)

    def check(b: float, a: float = 0.0, drawn: float = 0.05) -> Check:
        ours = pieces(a=a, b=b, c=0.01, d=0.01)
        return check_noisy_gradients("p", ours, low, exact, "", anew=lambda: [low, ones(a=0.01, b=drawn, c=0, d=0)])

    within = check(0.14)
    assert within.passed and within.bound == pytest.approx(5 * NOISE_FACTOR, rel=1e-3)
    assert within.note == "1.4e-01 from fp32, one process 1.0e-03, 5.0e-02 with its weights rounded otherwise"
    assert not check(0.16).passed and not check(0.14, drawn=0.04).passed
    beside = check(0.14, a=0.04)
    assert not beside.passed and (beside.worst, beside.bound) == ("a", NOISE_FACTOR)
    assert check(0.29, drawn=9.0).bound == MOST_NOISE * NOISE_FACTOR and not check(0.31, drawn=9.0).passed
    ours = pieces(**dict.fromkeys("abcd", 0.02))
    assert check_noisy_gradients("p", ours, low, exact, "", anew=lambda: pytest.fail("all is within its bound")).passed


EXACT, NOISE = [4.0, 4.0], 1e-4
DRAWN = 5e-4


def losses(*distances: float) -> list[float]:
    return [loss * (1 + distance) for loss, distance in zip(EXACT, distances, strict=True)]


def drawn() -> list[list[float]]:
    """Losses of one process, whose weights are rounded otherwise: in the second step one is farther off."""
    return [losses(0, 2e-5), losses(NOISE, -DRAWN), losses(-NOISE, 0)]


def test_planted_loss_beyond_what_rounding_in_16_bits_moves_is_seen() -> None:
    """One process lies near fp32 by chance; of those rounded otherwise one is farther off. What is beyond fails."""

    def check(first: float, second: float, anew: Any = drawn) -> Check:
        return check_noisy_losses("p", "loss", losses(first, second), losses(0, 3e-5), EXACT, NOISE, anew)

    within = check(2e-4, 5.2e-4)
    assert within.passed and (within.worst, within.bound) == ("step 2", pytest.approx(NOISE_FACTOR * DRAWN / NOISE))
    assert within.note == "5.2e-04 from fp32, one process at most 1.0e-04, 5.0e-04 with its weights rounded otherwise"
    alone = check(2e-4, 5.2e-4, None)
    assert not alone.passed and alone.note == "5.2e-04 from fp32, one process at most 1.0e-04"
    beyond = check(2e-4, 16e-4)
    assert not beyond.passed and "5.0e-04 with its weights" in beyond.note
    other = check(4e-4, 5.2e-4)  # no draw of the first step is as far off
    assert not other.passed and (other.worst, other.bound) == ("step 1", NOISE_FACTOR)
    far = [losses(0, 1.0)]
    assert check(0, 29e-4, lambda: far).bound == pytest.approx(MOST_NOISE * NOISE_FACTOR)
    for distance in (31e-4, math.inf, math.nan):
        assert not check(0, distance, lambda: far).passed
    assert check(2e-4, 2.9e-4, lambda: pytest.fail("all is within its bound")).passed


def test_planted_heldout_loss_beyond_what_rounding_in_16_bits_moves_is_seen() -> None:
    """The same at each moment, of the rank that is the farthest off."""
    exact = {"before": 4.0, "after": 4.0}

    def check(after: float, anew: bool = True) -> Check:
        before, end = losses(2e-4, after)
        ours = {"before": {"rank 0": before, "rank 1": before}, "after": {"rank 0": 4.0, "rank 1": end}}
        draws = [dict(zip(exact, each, strict=True)) for each in drawn()]
        return check_noisy_heldout("p", ours, exact, NOISE, (lambda: draws) if anew else None)

    within = check(-5.2e-4)
    assert within.passed and (within.worst, within.bound) == ("after", pytest.approx(NOISE_FACTOR * DRAWN / NOISE))
    assert within.note == "5.2e-04 from fp32, one process at most 1.0e-04, 5.0e-04 with its weights rounded otherwise"
    assert check(2.9e-4, anew=False).passed and not check(5.2e-4, anew=False).passed
    beyond = check(16e-4)
    assert not beyond.passed and beyond.worst == "after, rank 1"
    missed = check_noisy_heldout("p", {"before": {"rank 0": 4.0}}, exact, NOISE, lambda: pytest.fail("not of rounding"))
    assert not missed.passed and (missed.worst, missed.note) == ("after, no rank", "was not evaluated")
