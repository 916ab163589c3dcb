"""Buckets of gradients: what is in one, and in which order they are reduced."""

import dataclasses
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from launcher.config.layout_rules import with_switches
from launcher.config.load import load_config
from launcher.prove.matrix import Layout, fit
from parallel.config import ParallelConfig
from parallel.mesh import Axis
from parallel.zero.buckets import Bucket, WholeBucket, cut_into_buckets
from parallel.zero.scattered import Zero1Scattered

ALONE = Axis(0, 1, (0,), None)


def weights_of(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([5, 5, 5], 10, [[5, 5], [5]]),
        ([5, 6, 4], 10, [[5], [6, 4]]),
        ([3, 20, 3], 10, [[3], [20], [3]]),
        ([20], 10, [[20]]),
        ([1, 2, 3], 100, [[1, 2, 3]]),
    ],
)
def test_a_bucket_holds_what_fits_or_one_weight(sizes, most, expected):
    group = {"params": weights_of(*sizes), "weight_decay": 0.1}
    buckets = cut_into_buckets([group], most, lambda weight: None)
    assert [[weight.numel() for weight in bucket["params"]] for bucket in buckets] == expected
    assert all(bucket["weight_decay"] == 0.1 for bucket in buckets)
    assert [weight for bucket in buckets for weight in bucket["params"]] == group["params"]


def test_what_is_not_alike_has_other_buckets():
    weights = weights_of(1, 1, 1, 1)
    kinds = dict(zip(weights, "aabb", strict=True))
    buckets = cut_into_buckets([{"params": weights}], 100, kinds.__getitem__)
    assert [bucket["params"] for bucket in buckets] == [weights[:2], weights[2:]]


class Recording(Zero1Scattered):
    """One stage whose buckets have one weight each, first in order what is last in the model."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.buckets = [Bucket([weight], (0,), ALONE, torch.zeros(weight.numel())) for weight in weights]
        self.bucket_of = dict(zip(weights, self.buckets, strict=True))
        self.orders, self.n_launched, self.stages = [self.buckets[::-1]], [0], [set(weights)]
        self.reduced: list[Bucket] = []

    def reduce(self, bucket: Bucket) -> None:
        """Only takes note."""
        self.reduced.append(bucket)
        bucket.made.clear()


def make(weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)


@pytest.mark.parametrize("made", list(permutations(range(3))))
def test_buckets_are_reduced_in_one_order_whatever_is_made_first(made):
    weights = weights_of(1, 2, 3)
    sharding = Recording(weights)
    for number in made:
        make(weights[number])
        sharding.take(weights[number])
        assert sharding.reduced == sharding.orders[0][: len(sharding.reduced)]
    assert sharding.reduced == sharding.orders[0]
    sharding.end_pass(0)
    assert len(sharding.reduced) == 3


def test_the_end_of_a_pass_reduces_what_hooks_have_not_told_of():
    weights = weights_of(1, 2, 3)
    sharding = Recording(weights)
    make(weights[1])  # as zero-bubble schedules do; the others get no gradient
    sharding.end_pass(0)
    assert sharding.reduced == sharding.orders[0] and weights[1].grad is None
    sharding.end_pass(0)
    assert len(sharding.reduced) == 6


def test_a_bucket_starts_each_step_anew():
    first, second = weights_of(2, 3)
    bucket = Bucket([first, second], (0,), ALONE, torch.full((6,), torch.nan))
    for _ in range(2):
        for _ in range(2):
            make(second)
            bucket.take(second)
            bucket.add(bucket.packed(torch.float32))
        bucket.end(0.5)
        assert bucket.total.tolist() == [0, 0, 1, 1, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_whole_bucket_sums_passes_and_starts_each_step_anew(dtype):
    first, second = (nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (2, 3))
    bucket: Any = WholeBucket([first, second], (0,), ALONE, torch.zeros(6))
    for n_passes in (3, 2):
        for _ in range(n_passes):
            make(second)
            bucket.take(second)
            bucket.made.clear()
        bucket.add(bucket.packed(torch.float32))
        bucket.end(1.0)
        assert bucket.total.tolist() == [0, 0, *[n_passes] * 3, 0]


def test_two_gradients_of_one_pass_are_an_error():
    (weight,) = weights_of(2)
    bucket = Bucket([weight], (0,), ALONE, torch.zeros(2))
    make(weight)
    bucket.take(weight)
    make(weight)
    with pytest.raises(AssertionError, match="two gradients of one weight in one pass"):
        bucket.take(weight)


def test_another_stage_of_zero_leaves_out_what_it_cannot_do():
    given = ParallelConfig(tp=2, grad_reduce="micro_batch", grad_reduce_dtype="bf16")
    assert with_switches(given, given, None) == given
    assert with_switches(dataclasses.replace(given, zero=2), given, None) == ParallelConfig(tp=2, zero=2)


def test_a_matrix_of_proofs_keeps_the_key_where_it_does_something():
    config = load_config(Path("configs/quickstart.yaml"), ["parallel.grad_reduce=micro_batch"])
    kept = {}
    for zero in range(4):
        small, refused = fit(config, Layout(ParallelConfig(zero=zero), 2))
        assert not refused
        kept[zero] = small.parallel.grad_reduce
    assert kept == {0: "step", 1: "micro_batch", 2: "step", 3: "step"}
