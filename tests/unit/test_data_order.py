"""The order of samples: permutations, mixtures and skipped ranges, all as functions of the sample's number."""

import tracemalloc
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data.dataset import BLOCK
from data.mixture import mixture_of, weight_fraction
from data.order import permutation_key, permute, place_after, take
from data.shuffle import Shuffle
from data.stages import Stages


@given(n=st.integers(1, 5000), seed=st.integers(0, 2**63), epoch=st.integers(0, 100))
def test_every_index_is_visited_once(n: int, seed: int, epoch: int) -> None:
    images = permute(np.arange(n), n, permutation_key(seed, 0, epoch))
    assert images.dtype == np.int64
    assert sorted(images.tolist()) == list(range(n))


@given(n=st.integers(5000, 2**40), seed=st.integers(0, 1000))
def test_large_domains_stay_inside_and_apart(n: int, seed: int) -> None:
    index = np.unique(np.random.default_rng(seed).integers(0, n, 2000))
    images = permute(index, n, permutation_key(seed, 0, 0))
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == len(index)


@given(n=st.integers(2, 10_000), split=st.integers(0, 100))
def test_an_index_has_one_image_whatever_is_asked_with_it(n: int, split: int) -> None:
    key = permutation_key(1, 2, 3)
    whole = permute(np.arange(n), n, key)
    parts = [permute(part, n, key) for part in np.array_split(np.arange(n), split + 1)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert permute(np.array([n - 1]), n, key)[0] == whole[-1]


@pytest.mark.parametrize("n", [997, 4096, 100_003])
def test_it_looks_random(n: int) -> None:
    """Over 20 seeds: few fixed points and neighbours, no drift, no correlation with the index, even differences."""
    index = np.arange(n)
    fixed, neighbours, correlations = 0, 0, []
    for seed in range(20):
        images = permute(index, n, permutation_key(seed, 0, 0))
        fixed += int((images == index).sum())  # Poisson with mean 1 each: 20 in all
        neighbours += int((np.diff(images) == 1).sum())  # likewise
        correlations.append(np.corrcoef(index, images)[0, 1] * n**0.5)  # about a standard normal
        step = np.bincount((np.diff(images) % n) * 16 // n, minlength=16)
        chi_square = float(((step - n / 16) ** 2 / (n / 16)).sum())
        assert chi_square < 50  # 15 degrees of freedom: beyond this once in 80,000
    assert 5 <= fixed <= 45
    assert 5 <= neighbours <= 45
    assert abs(np.mean(correlations)) < 1
    assert np.std(correlations) < 2


def test_images_of_one_index_are_even_over_seeds() -> None:
    n, draws = 10, 3000
    images = [int(permute(np.array([3]), n, permutation_key(seed, 0, 0))[0]) for seed in range(draws)]
    counts = np.bincount(images, minlength=n)
    assert ((counts - draws / n) ** 2 / (draws / n)).sum() < 40  # 9 degrees of freedom: beyond this once in 100,000


def test_all_orders_of_four_occur() -> None:
    orders = Counter(tuple(permute(np.arange(4), 4, permutation_key(seed, 0, 0)).tolist()) for seed in range(2000))
    assert len(orders) == 24
    assert min(orders.values()) > 20


def test_seed_source_and_epoch_all_matter() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (10, 0, 0), (0, 10, 0)]
    orders = {tuple(permute(np.arange(1000), 1000, permutation_key(*key)).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_the_order_of_runs_that_began_earlier_stays() -> None:
    assert permute(np.arange(8), 8, permutation_key(1, 2, 3)).tolist() == [7, 4, 1, 6, 2, 0, 5, 3]


def test_numbers_too_large_for_64_bits_are_exact() -> None:
    mixture = mixture_of((weight_fraction(0.123456789012345), weight_fraction(0.9)))
    n = 10**15
    _, nth = mixture.deal(np.arange(n, n + 100))
    share = Fraction("0.123456789012345") / (Fraction("0.123456789012345") + Fraction("0.9"))
    before = n * share.numerator // share.denominator
    assert set(nth.tolist()) & {before} or set(nth.tolist()) & {n - before}


def test_weights_mean_what_is_written() -> None:
    assert weight_fraction(0.1) == Fraction(1, 10)
    assert weight_fraction(3e-4) == Fraction(3, 10_000)


def _slow_take(consumed: int, n: int, skipped: list[tuple[int, int]]) -> list[int]:
    taken: list[int] = []
    while len(taken) < n:
        if not any(start <= consumed < stop for start, stop in skipped):
            taken.append(consumed)
        consumed += 1
    return taken


@given(st.integers(0, 50), st.integers(0, 40), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=5))
@example(0, 3, [(3, 5)])  # the last one taken lies just before a range
def test_take_hops_over_skipped_ranges(consumed: int, n: int, skipped: list[tuple[int, int]]) -> None:
    taken = _slow_take(consumed, n, skipped)
    assert take(consumed, n, skipped).tolist() == taken
    assert place_after(consumed, n, skipped) == (taken[-1] + 1 if taken else consumed)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=3),
)
def test_take_in_any_batch_sizes_gives_the_same_samples(sizes: list[int], skipped: list[tuple[int, int]]) -> None:
    taken, consumed = [], 0
    for size in sizes:
        part = take(consumed, size, skipped)
        taken += part.tolist()
        consumed = taken[-1] + 1
    assert taken == take(0, sum(sizes), skipped).tolist()


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=9),
    st.integers(0, 300),
)
def test_what_each_source_has_given_is_a_closed_form(weights: list[int], n: int) -> None:
    mixture = mixture_of(tuple(Fraction(weight) for weight in weights))
    source_N, _ = mixture.deal(np.arange(n))
    given = mixture.given(n)
    assert given[: len(weights)] == np.bincount(source_N, minlength=len(weights)).tolist()
    assert sum(given) == n


def test_memory_does_not_grow_with_the_epochs_of_a_small_source() -> None:
    """A key is 0.5 kB, and a source of two samples has one for every other sample that it gives."""
    shuffle = Shuffle(0, Stages([(0, (Fraction(1, 2), Fraction(1, 2)))]), [2, 10**9])
    shuffle.samples(np.arange(BLOCK))
    tracemalloc.start()
    for first in range(0, 20 * BLOCK, BLOCK):
        shuffle.samples(np.arange(first, first + BLOCK))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 4_000_000
