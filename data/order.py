"""The order of samples as closed forms of a sample's number, so that any step can be reached at once.

Nothing is stored and nothing is drawn in sequence. A permutation is a Feistel network over [0, n); data/mixture.py and
data/stages.py decide from which source a sample comes.

Shape letters: N the samples asked for.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

ROUNDS = 6  # with four, neighbours stay neighbours twice as often as by chance (observed; Patarin 2001 explains it)
_MIX_1, _MIX_2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)  # odd: multiplying by them is bijective
_HALF, _ONE = np.uint64(32), np.uint64(1)


def permute(index_N: np.ndarray, n: int | np.ndarray, key: np.ndarray) -> np.ndarray:
    """The images of ``index_N`` (any integers in [0, n)) under the permutation of [0, n) given by ``key``; int64.

    A Feistel network on a grid of rows x columns >= n with modular addition (Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002): both sides near sqrt(n), so fewer than about 1 in sqrt(n) points leave
    [0, n); these are mapped again until they return. ``key``: uint64 [ROUNDS], from ``permutation_key``. Each index may
    have its own permutation: n is then int64 [N] and key uint64 [ROUNDS, N].
    """
    columns = np.sqrt(n).astype(np.uint64)
    rows = (np.asarray(n).astype(np.uint64) + columns - _ONE) // columns
    x_N = _feistel(np.array(index_N, dtype=np.uint64), rows, columns, key)
    while (outside_N := x_N >= n).any():
        x_N = np.where(outside_N, _feistel(x_N, rows, columns, key), x_N)
    return x_N.view(np.int64)


def unpermute(image_N: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """The inverse of ``permute``: the indices that have these images under the permutation of [0, n); int64.

    The rounds run backwards, and numbers that leave [0, n) are mapped again until they return.
    """
    columns = np.sqrt(n).astype(np.uint64)
    rows = (np.asarray(n).astype(np.uint64) + columns - _ONE) // columns
    x_N = _unfeistel(np.array(image_N, dtype=np.uint64), rows, columns, key)
    while (outside_N := x_N >= n).any():
        x_N = np.where(outside_N, _unfeistel(x_N, rows, columns, key), x_N)
    return x_N.view(np.int64)


def permutation_key(seed: int, source: int, epoch: int) -> np.ndarray:
    """The key of a source's permutation in an epoch: uint64 [ROUNDS], from sha256 of (seed, source's number, epoch)."""
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
    """The inverse of one pass of ``_feistel``: each round subtracts the hash that was added."""
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
    whole_N = mixed_N // modulus  # numpy divides by a scalar by multiplying, but does not take remainders so
    whole_N *= modulus
    mixed_N -= whole_N
    return mixed_N


def take(consumed: int, n: int, skipped: Sequence[tuple[int, int]] = ()) -> np.ndarray:
    """The next n sample numbers from ``consumed`` on, without the half-open ranges ``skipped``; int64 [n].

    ``consumed`` is a place in the training order (the samples before it were used or skipped): after a step it becomes
    the last number taken, plus one. Ranges may overlap and come in any order.
    """
    index_N = np.arange(consumed, consumed + n, dtype=np.int64)
    reached = consumed
    for start, stop in sorted(skipped):
        start = max(start, reached)
        if stop > start:
            index_N[index_N >= start] += stop - start
            reached = stop
    return index_N


def place_after(consumed: int, n: int, skipped: Sequence[tuple[int, int]] = ()) -> int:
    """The place after the next n samples: ``take``'s last number, plus one, without making the other numbers.

    It is ``consumed`` itself where n is 0.
    """
    reached = consumed
    for start, stop in sorted(skipped):
        start = max(start, reached)
        if n <= start - reached:
            break
        n -= start - reached
        reached = max(start, stop)
    return reached + n


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
