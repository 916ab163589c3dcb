"""Which sample comes next: closed forms of the sample's number, so any step can be reached at once.

Nothing is stored and nothing is drawn in sequence. A permutation is a Feistel network over [0, n); a mixture is a
tree of Bresenham splits, whose proportions are exact.

Shape letters: N the samples asked for.
"""

import hashlib
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

ROUNDS = 6  # with four, neighbours stay neighbours twice as often as chance has it (seen; Patarin 2001 says why)
_MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)  # odd: multiplying by them is bijective
_HALF, _ONE = np.uint64(32), np.uint64(1)


def permute(index_N: np.ndarray, n: int | np.ndarray, key: np.ndarray) -> np.ndarray:
    """The images of ``index_N`` (any integers in [0, n)) under the permutation of [0, n) that ``key`` names; int64.

    A Feistel network on a grid of rows x columns >= n with modular addition (Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002): both sides near sqrt(n), so fewer than about 1 in sqrt(n) points leave
    [0, n) and are walked on along their cycle. ``key``: uint64 [ROUNDS], from ``permutation_key``. Each index may have
    a permutation of its own: n is then int64 [N] and key uint64 [ROUNDS, N].
    """
    columns = np.sqrt(n).astype(np.uint64)
    rows = (np.asarray(n).astype(np.uint64) + columns - _ONE) // columns
    x_N = _feistel(np.array(index_N, dtype=np.uint64), rows, columns, key)
    while (outside_N := x_N >= n).any():
        x_N = np.where(outside_N, _feistel(x_N, rows, columns, key), x_N)
    return x_N.view(np.int64)


def unpermute(image_N: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """The inverse of ``permute``: which indices have these images under the permutation of [0, n); int64.

    The rounds run backwards, and what leaves [0, n) is walked back along its cycle.
    """
    columns = np.sqrt(n).astype(np.uint64)
    rows = (np.asarray(n).astype(np.uint64) + columns - _ONE) // columns
    x_N = _unfeistel(np.array(image_N, dtype=np.uint64), rows, columns, key)
    while (outside_N := x_N >= n).any():
        x_N = np.where(outside_N, _unfeistel(x_N, rows, columns, key), x_N)
    return x_N.view(np.int64)


def permutation_key(seed: int, source: int, epoch: int) -> np.ndarray:
    """uint64 [ROUNDS], from sha256 of (seed, source's place in the config, epoch)."""
    digests = [hashlib.sha256(f"order/{seed}/{source}/{epoch}/{part}".encode()).digest() for part in range(2)]
    return np.frombuffer(b"".join(digests), "<u8")[:ROUNDS]


def _feistel(x_N: np.ndarray, rows: np.ndarray, columns: np.ndarray, key: np.ndarray) -> np.ndarray:
    """One pass over the grid rows x columns: each round adds a hash of one side to the other."""
    left_N, right_N = np.divmod(x_N, columns)
    for i in range(0, ROUNDS, 2):
        left_N = _shift(left_N, right_N, key[i], rows)
        right_N = _shift(right_N, left_N, key[i + 1], columns)
    left_N *= columns
    left_N += right_N
    return left_N


def _unfeistel(x_N: np.ndarray, rows: np.ndarray, columns: np.ndarray, key: np.ndarray) -> np.ndarray:
    """One pass of ``_feistel`` backwards: each round takes off what it had added."""
    left_N, right_N = np.divmod(x_N, columns)
    for i in range(ROUNDS - 2, -1, -2):
        right_N = _unshift(right_N, left_N, key[i + 1], columns)
        left_N = _unshift(left_N, right_N, key[i], rows)
    return left_N * columns + right_N


def _unshift(sum_N: np.ndarray, other_N: np.ndarray, key: np.ndarray, modulus: np.ndarray) -> np.ndarray:
    """(sum - hash(other, key)) mod modulus."""
    return (sum_N + modulus - _shift(np.zeros_like(sum_N), other_N, key, modulus)) % modulus


def _shift(value_N: np.ndarray, other_N: np.ndarray, key: np.ndarray, modulus: np.ndarray) -> np.ndarray:
    """(value + hash(other, key)) mod modulus. Both sides are < 2**32, so nothing but the hash wraps around."""
    mixed_N = other_N + key
    mixed_N *= _MIX_1
    mixed_N ^= mixed_N >> _HALF
    mixed_N *= _MIX_2
    mixed_N >>= _HALF
    mixed_N += value_N
    mixed_N %= modulus
    return mixed_N


class Mixture:
    """Deals the global sample numbers out to sources in exact proportion to their weights.

    A binary tree over the sources: of the items that reach a node, item i goes left iff floor((i+1)p) > floor(ip),
    where p is the left half's share, and it is then item floor(ip) there. So after any n samples a source has had its
    share of them to within the depth of the tree.
    """

    def __init__(self, weights: Sequence[Fraction]) -> None:
        self._depth = max(0, len(weights) - 1).bit_length()
        totals = [Fraction()] * (1 << self._depth) + [*weights]  # a heap: node i's children are 2i and 2i + 1
        totals += [Fraction()] * ((2 << self._depth) - len(totals))
        for node in range((1 << self._depth) - 1, 0, -1):
            totals[node] = totals[2 * node] + totals[2 * node + 1]
        inner = range(1, 1 << self._depth)
        shares = [Fraction()] + [totals[2 * i] / totals[i] if totals[i] else Fraction(1) for i in inner]
        # A share that takes 2**31 parts or more to write is computed in Python's integers: slower, and as exact.
        self._shares = shares
        dtype = np.int64 if all(share.denominator < 2**31 for share in shares) else object
        self._numerators = np.array([share.numerator for share in shares], dtype)
        self._denominators = np.array([share.denominator for share in shares], dtype)

    def deal(self, index_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source_N, nth_N), int64: the source of each sample, and how many samples that source gave before it."""
        node_N, nth_N = np.ones(len(index_N), np.int64), np.array(index_N, dtype=np.int64)
        for _ in range(self._depth):
            numerator_N, denominator_N = self._numerators[node_N], self._denominators[node_N]
            whole_N = nth_N // denominator_N
            rest_N = (nth_N - whole_N * denominator_N) * numerator_N  # < 2**62: ip itself may not fit
            part_N = rest_N // denominator_N
            before_N = (whole_N * numerator_N + part_N).astype(np.int64)  # floor(ip)
            goes_left_N = (rest_N - part_N * denominator_N + numerator_N >= denominator_N).astype(bool)
            nth_N = np.where(goes_left_N, before_N, nth_N - before_N)
            node_N = 2 * node_N + ~goes_left_N
        return node_N - (1 << self._depth), nth_N

    def number_of(self, source: int, nth: int) -> int:
        """The number of the sample that ``source`` gives after ``nth`` others: what ``deal`` turns into these two.

        With a left share p, a node's item k of the left is its item ceil((k + 1) / p) - 1, and item k of the right is
        floor(k / (1 - p)).
        """
        node = (1 << self._depth) + source
        while node > 1:
            is_right, node = node % 2, node // 2
            top, bottom = self._shares[node].numerator, self._shares[node].denominator
            nth = nth * bottom // (bottom - top) if is_right else -(-(nth + 1) * bottom // top) - 1
        return nth

    def given(self, n: int) -> list[int]:
        """How many of the first ``n`` samples each source gives."""
        counts = [0, n] + [0] * ((2 << self._depth) - 2)
        for node in range(1, 1 << self._depth):
            share = self._shares[node]
            counts[2 * node] = counts[node] * share.numerator // share.denominator
            counts[2 * node + 1] = counts[node] - counts[2 * node]
        return counts[1 << self._depth :]


def weight_fraction(weight: float) -> Fraction:
    """The weight as it is written: 0.1 is one tenth, not the binary number next to it."""
    return Fraction(repr(weight))


def take(consumed: int, n: int, skipped: Sequence[tuple[int, int]] = ()) -> np.ndarray:
    """The next n sample numbers from ``consumed`` on, hopping over the half-open ranges ``skipped``; int64 [n].

    ``consumed`` is a place in the global numbering (the samples before it were used or skipped): after a step it
    becomes the last number taken, plus one. Ranges may overlap and come in any order.
    """
    index_N = np.arange(consumed, consumed + n, dtype=np.int64)
    reached = consumed
    for start, stop in sorted(skipped):
        start = max(start, reached)
        if stop > start:
            index_N[index_N >= start] += stop - start
            reached = stop
    return index_N


def hopped_ranges(start: int, stop: int, skipped: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The numbers within [start, stop) that ``skipped`` holds, as ascending half-open ranges that do not touch."""
    ranges: list[list[int]] = []
    for first, last in sorted(skipped):
        first, last = max(first, start), min(last, stop)
        if ranges and first <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], last)
        elif first < last:
            ranges.append([first, last])
    return ranges
