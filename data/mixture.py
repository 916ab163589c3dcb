"""Mixtures of sources: which source gives a sample, in exact proportion to the weights, from the sample's number.

There are two ways to deal samples to sources, both stateless, so that any sample can be reached at once: a tree of
roundings for few sources and for weights without a small common unit, and a table of one period otherwise.

Shape letters: N the samples asked for, D the samples of a period.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm

import numpy as np

DEALING = 2  # version of the order in which samples are dealt to three or more sources; recorded in checkpoints
MOST_IN_TREE = 4  # sources that a tree of depth two holds, whose rounding errors add up to at most one sample
LONGEST_PERIOD = 1 << 17  # samples of a table: 0.3 s to make, 1 MB (2026-11-23, Intel Xeon with AMX)
EXACT = 1 << 30  # a share with a larger denominator is computed in Python's integers: slower, and as exact


def weight_fraction(weight: float) -> Fraction:
    """The weight as it is written in decimal: 0.1 is one tenth, not the nearest binary number."""
    return Fraction(repr(weight))


class Tree:
    """Deals samples to sources by a binary tree of roundings.

    Of the items that reach a node, item i goes left iff round((i + 1)p) > round(ip), where p is the left half's share,
    and it is then item round(ip) there. ``round`` is the floor for one or two sources, and otherwise rounds to nearest,
    so that a node adds an error of at most half a sample: after any n samples a source has had its share of them to
    within half the tree's depth, and to within one sample where the depth is one.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self._depth = max(0, len(weights) - 1).bit_length()
        totals = [Fraction()] * (1 << self._depth) + [*weights]  # a heap: node i's children are 2i and 2i + 1
        totals += [Fraction()] * ((2 << self._depth) - len(totals))
        for node in range((1 << self._depth) - 1, 0, -1):
            totals[node] = totals[2 * node] + totals[2 * node + 1]
        inner = range(1, 1 << self._depth)
        self._shares = [Fraction()] + [totals[2 * i] / totals[i] if totals[i] else Fraction(1) for i in inner]
        self._halves = [share.denominator if self._depth > 1 else 0 for share in self._shares]  # one half, times 2D
        dtype = np.int64 if all(share.denominator < EXACT for share in self._shares) else object
        self._numerators = np.array([share.numerator for share in self._shares], dtype)
        self._denominators = np.array([share.denominator for share in self._shares], dtype)

    def deal(self, index_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source_N, nth_N), int64: the source of each sample, and how many samples that source gave before it."""
        node_N, nth_N = np.ones(len(index_N), np.int64), np.array(index_N, dtype=np.int64)
        for _ in range(self._depth):
            numerator_N, denominator_N = self._numerators[node_N], self._denominators[node_N]
            half_N = denominator_N if self._depth > 1 else 0
            whole_N = nth_N // denominator_N
            rest_N = 2 * (nth_N - whole_N * denominator_N) * numerator_N + half_N  # < 2**62: ip itself may not fit
            part_N = rest_N // (2 * denominator_N)
            before_N = (whole_N * numerator_N + part_N).astype(np.int64)  # round(ip)
            left_over_N = rest_N - 2 * part_N * denominator_N
            goes_left_N = (left_over_N + 2 * numerator_N >= 2 * denominator_N).astype(bool)
            nth_N = np.where(goes_left_N, before_N, nth_N - before_N)
            node_N = 2 * node_N + ~goes_left_N
        return node_N - (1 << self._depth), nth_N

    def number_of(self, source: int, nth: int) -> int:
        """The number of the sample that ``source`` gives after ``nth`` others: the inverse of ``deal``.

        With a left share p and a half h (0 where the rounding is the floor), a node's item k of the left is its item
        ceil((k + 1 - h) / p) - 1, and item k of the right is floor((k + h) / (1 - p)).
        """
        node = (1 << self._depth) + source
        while node > 1:
            is_right, node = node % 2, node // 2
            top, bottom, half = self._shares[node].numerator, self._shares[node].denominator, self._halves[node]
            if is_right:
                nth = (2 * nth * bottom + half) // (2 * (bottom - top))
            else:
                nth = -(-(2 * (nth + 1) * bottom - half) // (2 * top)) - 1
        return nth

    def given(self, n: int) -> list[int]:
        """How many of the first ``n`` samples each source gives."""
        counts = [0, n] + [0] * ((2 << self._depth) - 2)
        for node in range(1, 1 << self._depth):
            top, bottom = self._shares[node].numerator, self._shares[node].denominator
            counts[2 * node] = (2 * counts[node] * top + self._halves[node]) // (2 * bottom)
            counts[2 * node + 1] = counts[node] - counts[2 * node]
        return counts[1 << self._depth :]


class Table:
    """Deals samples to sources by a table of one period, in which each source has a whole number of samples.

    After any n samples a source has had its share w of them to within less than one sample: its item j comes after
    sample floor(j / w) - 1 and before sample ceil((j + 1) / w), and of the items that may come next, the one with the
    earliest deadline does. Such an order exists for any weights, and this rule finds it (Baruah, Cohen, Plaxton and
    Varvel, "Proportionate Progress", 1996).
    """

    def __init__(self, parts: Sequence[int]) -> None:
        """``parts`` are the numbers of samples of each source in a period, all above 0."""
        self._parts, self._period = list(parts), sum(parts)
        self._source_D = np.array(_earliest_deadlines(parts), np.int64)
        self._places = [np.flatnonzero(self._source_D == source) for source in range(len(parts))]
        self._rank_D = np.empty_like(self._source_D)
        for places in self._places:
            self._rank_D[places] = np.arange(len(places))

    def deal(self, index_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source_N, nth_N), int64: the source of each sample, and how many samples that source gave before it."""
        period_N, place_N = np.divmod(np.asarray(index_N, np.int64), self._period)
        source_N = self._source_D[place_N]
        return source_N, period_N * np.array(self._parts)[source_N] + self._rank_D[place_N]

    def number_of(self, source: int, nth: int) -> int:
        """The number of the sample that ``source`` gives after ``nth`` others."""
        period, rank = divmod(nth, self._parts[source])
        return period * self._period + int(self._places[source][rank])

    def given(self, n: int) -> list[int]:
        """How many of the first ``n`` samples each source gives."""
        periods, rest = divmod(n, self._period)
        within = (int(np.searchsorted(places, rest)) for places in self._places)
        return [periods * part + count for part, count in zip(self._parts, within, strict=True)]


@lru_cache(maxsize=64)
def mixture_of(weights: tuple[Fraction, ...]) -> Tree | Table:
    """The mixture that deals samples by these weights, all above 0.

    It is a tree for up to four sources, and where no table of at most ``LONGEST_PERIOD`` samples is exact.
    """
    unit = lcm(*(weight.denominator for weight in weights))
    parts = [int(weight * unit) for weight in weights]
    common = gcd(*parts)
    if len(weights) <= MOST_IN_TREE or sum(parts) // common > LONGEST_PERIOD:
        return Tree(weights)
    return Table([part // common for part in parts])


def _earliest_deadlines(parts: Sequence[int]) -> list[int]:
    """The source of each sample of a period: of the items that may come next, the one with the first deadline."""
    period = sum(parts)
    order: list[int] = []
    waiting: dict[int, list[int]] = {0: [*range(len(parts))]}  # sample -> sources whose next item may come from it on
    ready: list[tuple[int, int]] = []  # (the sample before which it must come, source)
    nth = [0] * len(parts)
    for number in range(period):
        for source in waiting.pop(number, ()):
            heapq.heappush(ready, (-(-(nth[source] + 1) * period // parts[source]), source))
        _, source = heapq.heappop(ready)
        order.append(source)
        nth[source] += 1
        may_come = max(nth[source] * period // parts[source], number + 1)
        waiting.setdefault(may_come, []).append(source)
    return order
