"""The training order's stages: weights that change at given samples, and sources that end after a number of epochs.

The order is divided into segments. A segment begins where a stage does, or where a source has reached its limit of
epochs; within it the remaining sources are mixed anew by their weights (data/mixture.py). Where segments begin follows
from the weights and the sources' sizes alone, so any sample's source is found at once.

Shape letters: N the samples asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from data.config import DataConfig, StageConfig
from data.mixture import Table, Tree, mixture_of, weight_fraction

Weights = tuple[Fraction, ...]


@dataclass(frozen=True)
class Segment:
    """A part of the training order that is mixed by one set of weights."""

    first: int  # its first sample
    stage: int  # its stage, from 0
    weights: Weights  # of all sources; 0 for one that gives no samples here
    sources: tuple[int, ...]  # the sources that give samples
    before: tuple[int, ...]  # how many samples each source has given before the segment

    @cached_property
    def mixture(self) -> Tree | Table:
        """The mixture that deals the segment's samples to ``sources``."""
        return mixture_of(tuple(self.weights[source] for source in self.sources))

    @cached_property
    def shares(self) -> tuple[Fraction, ...]:
        """Each source's share of the samples; the shares sum to 1."""
        total = sum(self.weights)
        return tuple(weight / total for weight in self.weights)

    def given(self, n: int) -> list[int]:
        """How many samples of the order each source has given after ``n`` samples of the segment."""
        counts = list(self.before)
        for source, count in zip(self.sources, self.mixture.given(n), strict=False):
            counts[source] += count
        return counts


class Stages:
    """Deals the training order's samples to sources. ``end`` is the number of all samples; None: they never end."""

    def __init__(self, stages: Sequence[tuple[int, Weights]], limits: Sequence[int | None] = ()) -> None:
        """``stages`` are pairs of a stage's first sample, ascending from 0, and the weight of each source in it.

        ``limits`` are the most samples that each source may give in all; None: any number.
        """
        limits, self.n_stages = limits or [None] * len(stages[0][1]), len(stages)
        segment: Segment | None = _segment(stages, 0, (0,) * len(limits), limits)
        self.segments: list[Segment] = []
        self.end: int | None = None
        while segment is not None:
            following = _next_segment(stages, segment, limits)
            if not segment.sources:
                self.end, following = segment.first, None
            else:
                self.segments.append(segment)
            segment = following
        self._firsts = np.array([segment.first for segment in self.segments], np.int64)

    def __eq__(self, other: object) -> bool:
        """Whether both deal all samples alike."""
        return isinstance(other, Stages) and (self.segments, self.end) == (other.segments, other.end)

    __hash__ = None  # type: ignore[assignment]

    def deal(self, index_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source_N, nth_N), int64: the source of each sample, and how many samples that source gave before it.

        All samples lie before ``end``.
        """
        index_N = np.asarray(index_N, np.int64)
        segment_N = np.searchsorted(self._firsts, index_N, side="right") - 1
        source_N, nth_N = np.empty_like(index_N), np.empty_like(index_N)
        for number in np.unique(segment_N).tolist():
            segment, is_here_N = self.segments[number], segment_N == number
            source_M, nth_M = segment.mixture.deal(index_N[is_here_N] - segment.first)
            source_M = np.array(segment.sources)[source_M]
            source_N[is_here_N], nth_N[is_here_N] = source_M, nth_M + np.array(segment.before)[source_M]
        return source_N, nth_N

    def number_of(self, source: int, nth: int) -> int | None:
        """The number of the sample that ``source`` gives after ``nth`` others; None where it never does."""
        after = [segment.before[source] > nth for segment in self.segments]
        segment = self.segments[after.index(True) - 1 if True in after else -1]
        if source not in segment.sources:
            return None
        own = segment.sources.index(source)
        number = segment.first + segment.mixture.number_of(own, nth - segment.before[source])
        return number if self.end is None or number < self.end else None

    def given(self, n: int) -> list[int]:
        """How many of the first ``n`` samples each source gives."""
        segment = self._segment_at(max(0, n - 1))
        return segment.given(n - segment.first)

    def expected(self, n: int) -> list[Fraction]:
        """Each source's exact share of the first ``n`` samples by the weights, which ``given`` rounds."""
        segment = self._segment_at(max(0, n - 1))
        shares = zip(segment.before, segment.shares, strict=True)
        return [before + (n - segment.first) * share for before, share in shares]

    def expected_at(self, source: int, count: int) -> Fraction | None:
        """The number of samples of which the source's share by the weights is ``count``; None where it never is."""
        stops = [segment.first for segment in self.segments[1:]] + [self.end]
        for segment, stop in zip(self.segments, stops, strict=True):
            share = segment.shares[source]
            if share and (stop is None or count <= segment.given(stop - segment.first)[source]):
                number = segment.first + (count - segment.before[source]) / share
                return number if stop is None else min(number, Fraction(stop))
        return None

    def stage_at(self, number: int) -> int:
        """The stage, from 0, that a sample lies in."""
        return self._segment_at(number).stage

    def _segment_at(self, number: int) -> Segment:
        return self.segments[int(np.searchsorted(self._firsts, number, side="right")) - 1]


def _segment(
    stages: Sequence[tuple[int, Weights]], first: int, before: tuple[int, ...], limits: Sequence[int | None]
) -> Segment:
    """The segment that begins at sample ``first``, after each source has given ``before`` samples."""
    stage = max(number for number, (start, _) in enumerate(stages) if start <= first)
    weights = tuple(
        weight if limit is None or given < limit else Fraction()
        for weight, limit, given in zip(stages[stage][1], limits, before, strict=True)
    )
    return Segment(first, stage, weights, tuple(s for s, weight in enumerate(weights) if weight), before)


def _next_segment(
    stages: Sequence[tuple[int, Weights]], segment: Segment, limits: Sequence[int | None]
) -> Segment | None:
    """The segment after another: the next stage, or the same one without a source at its limit; None: there is none."""
    ends = [start for start, _ in stages if start > segment.first][:1]
    for own, source in enumerate(segment.sources):
        limit = limits[source]
        if limit is not None:
            last = segment.mixture.number_of(own, limit - segment.before[source] - 1)
            ends.append(segment.first + last + 1)
    if not ends or not segment.sources:
        return None
    return _segment(stages, min(ends), tuple(segment.given(min(ends) - segment.first)), limits)


def stages_of(config: DataConfig, sizes: Sequence[int]) -> Stages:
    """The training order's stages under this config. ``sizes`` are the samples in one epoch of each source."""
    limits = [
        None if source.max_epochs is None else max(1, int(weight_fraction(source.max_epochs) * size))
        for source, size in zip(config.sources, sizes, strict=True)
    ]
    scales = [size if config.weighting == "size" else 1 for size in sizes]
    written = [
        (first, tuple(weight * scale for weight, scale in zip(weights, scales, strict=True)))
        for first, weights in weights_by_stage(config)
    ]
    return Stages(written, limits)


def weights_by_stage(config: DataConfig) -> list[tuple[int, Weights]]:
    """(first sample, weights as written in the config) of each stage, ascending from sample 0."""
    own = tuple(weight_fraction(source.weight) for source in config.sources)
    listed = [
        (first_sample(stage, config.seq_len), tuple(map(weight_fraction, stage.weights))) for stage in config.stages
    ]
    return ([] if listed and listed[0][0] == 0 else [(0, own)]) + listed


def first_sample(stage: StageConfig, seq_len: int) -> int:
    """The first sample of a stage: the first one that begins at ``from_tokens`` or later."""
    return -(-stage.from_tokens // seq_len)


def first_change(old: DataConfig, new: DataConfig) -> int | None:
    """The first sample whose stage differs between two configs that are otherwise alike; None where there is none."""
    before, after = weights_by_stage(old), weights_by_stage(new)
    firsts = sorted({first for first, _ in before + after})
    return next((first for first in firsts if _shares(before, first) != _shares(after, first)), None)


def _shares(stages: list[tuple[int, Weights]], number: int) -> tuple[int, Weights]:
    """(first sample, weights) of the stage in which a sample lies; its first sample matters for dealing, too."""
    return next((first, weights) for first, weights in reversed(stages) if first <= number)
