"""Mixtures and their stages: counts that keep to the weights, as functions of the sample's number, caps and changes."""

from fractions import Fraction
from itertools import pairwise
from math import lcm

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import mixture as mixture_module
from data.config import DataConfig, SourceConfig, StageConfig
from data.mixture import LONGEST_PERIOD, Table, Tree, mixture_of
from data.rules import check_data
from data.shuffle import Shuffle
from data.stages import Stages, first_change, stages_of

FAR = 10**12
WEIGHTS = st.integers(1, 999).map(lambda parts: Fraction(parts, 100))


def check_near(source_N: np.ndarray, weights: tuple[Fraction, ...], had: list[Fraction], most: Fraction) -> None:
    """After each of these samples every source has had its weight of them, to within ``most``; ``had``: lags before."""
    unit = lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * unit) for weight in weights]
    numbers = np.arange(1, len(source_N) + 1).astype(object)
    for source, part in enumerate(parts):
        drift = np.cumsum(source_N == source).astype(object) * sum(parts) - numbers * part  # in parts of a sample
        before = had[source] * sum(parts)
        assert max(abs(before + drift.max()), abs(before + drift.min())) <= most * sum(parts)


@settings(deadline=None)
@given(st.lists(WEIGHTS, min_size=1, max_size=9).map(tuple), st.integers(0, FAR))
def test_counts_never_drift_more_than_a_sample(weights: tuple[Fraction, ...], start: int) -> None:
    """From the first sample on, and far into the order, where what came before is told by ``given``."""
    mixture, total = mixture_of(weights), sum(weights)
    for first in (0, start):
        before = mixture.given(first)[: len(weights)]
        lags = [count - first * weight / total for count, weight in zip(before, weights, strict=True)]
        source_N, nth_N = mixture.deal(np.arange(first, first + 200))
        check_near(source_N, weights, lags, Fraction(1))
        for source in range(len(weights)):
            own = nth_N[source_N == source].tolist()
            assert own == list(range(before[source], before[source] + len(own)))
        pairs = zip(source_N.tolist(), nth_N.tolist(), strict=True)
        assert [mixture.number_of(*pair) for pair in pairs] == list(range(first, first + 200))


@given(st.lists(st.floats(1e-3, 1e3), min_size=5, max_size=16), st.integers(0, FAR))
def test_weights_without_a_small_unit_stay_within_half_the_depth_of_the_tree(weights: list[float], first: int) -> None:
    fractions = tuple(map(mixture_module.weight_fraction, weights))
    mixture, total = mixture_of(fractions), sum(fractions)
    lags = [n - first * w / total for n, w in zip(mixture.given(first), fractions, strict=False)]
    most = Fraction(1) if isinstance(mixture, Table) else Fraction((len(weights) - 1).bit_length(), 2)
    check_near(mixture.deal(np.arange(first, first + 100))[0], fractions, lags, most)


def test_planted_a_tree_of_floors_is_seen_to_drift() -> None:
    """Four sources by floors alone, as a tree of depth one has them."""
    weights = tuple(Fraction(part, 102) for part in (50, 10, 31, 11))
    tree = Tree(weights)
    sound = tree.given(3)
    tree._halves = [0] * len(tree._halves)
    drifts = [[abs(count - 3 * w) for count, w in zip(given, weights, strict=True)] for given in (sound, tree.given(3))]
    assert max(drifts[0]) <= 1 < max(drifts[1])


def test_one_or_two_sources_are_dealt_as_ever() -> None:
    """floor((i + 1)p) > floor(ip): runs that began before there were stages go on."""
    source_N, _ = mixture_of((Fraction(3, 10), Fraction(7, 10))).deal(np.arange(20))
    assert source_N.tolist() == [int((i + 1) * 3 // 10 == i * 3 // 10) for i in range(20)]


def test_which_mixtures_are_tables() -> None:
    parts = (LONGEST_PERIOD - 4, 1, 1, 1, 1)
    assert isinstance(mixture_of(tuple(map(Fraction, parts))), Table)
    assert isinstance(mixture_of(tuple(map(Fraction, (parts[0] + 1, *parts[1:])))), Tree)
    assert isinstance(mixture_of(tuple(map(Fraction, (1, 2, 3, 4)))), Tree)


@st.composite
def stage_tables(draw: st.DrawFn) -> tuple[list[tuple[int, tuple[Fraction, ...]]], list[int | None]]:
    """Stages with weights, 0 among them, at random places up to 10^12, and limits for some of the sources."""
    n_sources = draw(st.integers(1, 7))
    firsts = sorted(draw(st.sets(st.integers(1, 400) | st.integers(1, FAR), max_size=4)))
    weights = st.lists(WEIGHTS | st.just(Fraction(0)), min_size=n_sources, max_size=n_sources).filter(any).map(tuple)
    stages = [(first, draw(weights)) for first in (0, *firsts)]
    limits = draw(
        st.lists(st.none() | st.integers(1, 200) | st.integers(1, FAR), min_size=n_sources, max_size=n_sources)
    )
    return stages, limits


@settings(deadline=None)
@given(stage_tables(), st.integers(0, FAR))
def test_stages_keep_to_their_weights_and_limits(table, somewhere: int) -> None:
    """Around the start, each change of weights and a random place: drift, places, limits, and the way back."""
    stages = Stages(*table)
    end, limits = stages.end, table[1]
    for first in {0, somewhere, *(max(0, segment.first - 40) for segment in stages.segments)}:
        stop = first + 120 if end is None else min(first + 120, end)
        if first >= stop:
            continue
        source_N, nth_N = stages.deal(np.arange(first, stop))
        for number, (source, nth) in enumerate(zip(source_N.tolist(), nth_N.tolist(), strict=True), first):
            assert stages.number_of(source, nth) == number
            assert limits[source] is None or nth < limits[source]
        counts = np.array([stages.given(n) for n in range(first, stop + 1)])
        np.testing.assert_array_equal(np.diff(counts, axis=0), np.eye(counts.shape[1], dtype=int)[source_N])
    bounds = [segment.first for segment in stages.segments] + [end if end is not None else 2 * FAR]
    for segment, (first, stop) in zip(stages.segments, pairwise(bounds), strict=True):
        for n in {1, (stop - first) // 2, stop - first}:
            for source, share in enumerate(segment.shares):
                drift = stages.given(first + n)[source] - segment.before[source] - n * share
                assert abs(drift) <= 1


def test_a_limit_ends_a_source_and_the_others_share_what_it_had() -> None:
    stages = Stages([(0, (Fraction(1), Fraction(1), Fraction(2)))], [10, None, 100])
    source_N, _ = stages.deal(np.arange(4000))
    assert [np.count_nonzero(source_N == source) for source in (0, 2)] == [10, 100]
    assert (source_N[stages.segments[2].first :] == 1).all()
    assert [segment.weights for segment in stages.segments] == [(1, 1, 2), (0, 1, 2), (0, 1, 0)]
    assert stages.end is None
    assert stages.number_of(0, 10) is None
    ending = Stages([(0, (Fraction(1), Fraction(1)))], [3, 4])
    assert (ending.end, ending.number_of(1, 3), ending.number_of(1, 4)) == (7, 6, None)


def test_a_stage_of_the_second_source_alone_reads_its_samples() -> None:
    shuffle = Shuffle(0, Stages([(0, (Fraction(0), Fraction(1)))]), [5, 7])
    for places in (np.arange(7), np.arange(7, 14)):  # an epoch each
        assert sorted(shuffle.samples(places).tolist()) == [*range(5, 12)]


def config_of(*stages: tuple[int, tuple[float, ...]], **changes) -> DataConfig:
    """Two sources and these stages, given by tokens; a sequence has 8."""
    sources = (SourceConfig(path="a", weight=0.9), SourceConfig(path="b", weight=0.1, max_epochs=1.5))
    listed = tuple(StageConfig(from_tokens=first, weights=weights) for first, weights in stages)
    return DataConfig(seq_len=8, sources=sources, stages=listed, **changes)


def test_a_config_says_stages_limits_and_sizes() -> None:
    stages = stages_of(config_of((81, (0.5, 0.5))), [100, 40])
    assert [(s.first, s.stage, s.weights) for s in stages.segments[:2]] == [
        (0, 0, (Fraction(9, 10), Fraction(1, 10))),
        (11, 1, (Fraction(1, 2), Fraction(1, 2))),
    ]
    assert stages.given(10**6)[1] == 60
    by_size = stages_of(config_of(weighting="size"), [100, 50])
    assert by_size.segments[0].shares == (Fraction(18, 19), Fraction(1, 19))
    assert float(stages.expected(11)[1]) == 1.1
    assert (stages.given(11)[1], stages.expected_at(1, 2)) == (2, 11)  # by its weight 20, in a stage that ends at 11
    assert stages.expected_at(1, 60) is not None and stages.expected_at(1, 61) is None


def test_the_first_change_between_stages() -> None:
    old = config_of((80, (0.5, 0.5)), (160, (0.1, 0.9)))
    assert first_change(old, old) is None
    assert first_change(old, config_of((80, (0.5, 0.5)), (168, (0.1, 0.9)))) == 20
    assert first_change(old, config_of((80, (0.5, 0.5)))) == 20
    assert first_change(old, config_of((80, (0.5, 0.4)), (160, (0.1, 0.9)))) == 10
    assert first_change(old, config_of((0, (0.9, 0.1)), (80, (0.5, 0.5)), (160, (0.1, 0.9)))) is None


@given(st.integers(1, 300), st.integers(0, 400))
def test_what_lies_before_the_first_change_is_dealt_as_before(begin: int, n: int) -> None:
    old, new = config_of((80, (0.5, 0.5))), config_of((80, (0.5, 0.5)), (80 + 8 * begin, (0.2, 0.8)))
    changed = first_change(old, new)
    assert changed == 10 + begin
    before, after = (stages_of(config, [100, 40]).deal(np.arange(min(n, changed))) for config in (old, new))
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("stages", "line"),
    [
        (((8, (1.0,)),), "data.stages[0].weights=[1.0] must hold one weight for each of data.sources, 2, and holds 1; give 0 to a source that is not to be read"),
        (((8, (0.0, 0.0)),), "data.stages[0].weights=[0.0, 0.0] must hold a weight above 0; try 1.0 for one of them"),
        (((8, (1.0, 1e-9)),), "data.stages[0].weights=[1.0, 1e-09] holds 1e-09, and a weight must be 0 or at least 1e-06; scale them all up, or set it to 0"),
        (((9, (1.0, 1.0)), (16, (1.0, 2.0))), "data.stages[1].from_tokens=16 must be a sequence or more after the stage before it; try 24, or more"),
    ],
)  # fmt: skip
def test_refused_stages(stages, line, tmp_path) -> None:
    lines = check_data(config_of(*stages, token_dir=str(tmp_path)), 300)
    assert [each for each in lines if each.startswith("data.stages")] == [line]
