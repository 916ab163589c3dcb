"""Recomputation under backward passes that come in parts: one more forward pass for all of them, and nothing stays."""

import gc

import pytest
import torch
from torch import Tensor

from parallel.recompute import _Call, recomputed, recomputed_for_parts


class Layer:
    """A function of two weights that counts how often it runs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = (torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2))
        self.input = torch.randn(3, 4, generator=generator, requires_grad=True)
        self.runs = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(torch.tanh(hidden @ self.first) @ self.second) + hidden

    def gradients_in_parts(self, run: object) -> list[Tensor]:
        """Of the input, then of each weight, by a backward pass each."""
        total = run(self.input).square().sum()  # type: ignore[operator]
        parts = (self.input, self.first, self.second)
        return [torch.autograd.grad(total, part, retain_graph=True)[0] for part in parts]


def calls_alive() -> int:
    return sum(type(thing) is _Call for thing in gc.get_objects())


def test_one_run_serves_every_part_and_gradients_are_the_same():
    layer = Layer()
    expected = layer.gradients_in_parts(layer)
    layer.runs = 0
    found = layer.gradients_in_parts(recomputed_for_parts(layer))
    assert layer.runs == 2
    assert all(map(torch.equal, found, expected))


def test_torchs_own_runs_again_for_each_part():
    """Why there is another: should this fail, torch has learned it, and ours can go."""
    layer = Layer()
    layer.gradients_in_parts(recomputed(layer))
    assert layer.runs == 4


def test_nothing_stays_once_the_graph_is_gone():
    """Without the garbage collector, which training switches off: a cycle would hold the activations."""
    gc.collect()
    gc.disable()
    try:
        layer = Layer()
        layer.gradients_in_parts(recomputed_for_parts(layer))
        assert calls_alive() == 0
    finally:
        gc.enable()


def test_planted_a_function_that_saves_less_the_second_time_is_noticed():
    layer = Layer()

    def fickle(hidden: Tensor) -> Tensor:
        return layer(hidden) if layer.runs == 0 else hidden * 2

    with pytest.raises(AssertionError, match="the second run saved 0 tensors, the first"):
        recomputed_for_parts(fickle)(layer.input).sum().backward()
