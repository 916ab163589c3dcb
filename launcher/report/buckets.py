"""Long curves made short without losing a spike: of each bucket of updates the mean, the lowest and the highest.

Shape letters: N updates, P buckets.
"""

import math
from typing import Any

import numpy as np

DIGITS = 5  # that a drawn number keeps


def bounds_of(n_updates: int, most: int) -> np.ndarray:
    """Where each bucket begins: int64 [P], P = min(n_updates, most), of nearly equal sizes."""
    n_buckets = min(n_updates, most)
    return np.arange(n_buckets, dtype=np.int64) * n_updates // max(n_buckets, 1)


def bucketed(values_N: np.ndarray, bounds_P: np.ndarray) -> dict[str, list[Any]]:
    """The curve as a page draws it: ``mean``, and where buckets hold several updates ``low``, ``high`` and ``at``.

    ``at`` is the place of the highest value, counted from its bucket's first update. Values that are not finite are
    left out; a bucket without any other is null.
    """
    finite_N = np.isfinite(values_N)
    counts_P = np.add.reduceat(finite_N, bounds_P, dtype=np.int64)
    sums_P = np.add.reduceat(np.where(finite_N, values_N, 0.0), bounds_P)
    found = {"mean": short(np.where(counts_P > 0, sums_P / np.maximum(counts_P, 1), math.nan))}
    if len(bounds_P) == len(values_N):
        return found
    kept_N = np.where(finite_N, values_N, math.nan)
    low_P, high_P = np.fmin.reduceat(kept_N, bounds_P), np.fmax.reduceat(kept_N, bounds_P)
    sizes_P = np.diff(np.append(bounds_P, len(values_N)))
    index_N = np.arange(len(values_N)) - np.repeat(bounds_P, sizes_P)
    is_high_N = kept_N == np.repeat(high_P, sizes_P)
    at_P = np.minimum.reduceat(np.where(is_high_N, index_N, len(values_N)), bounds_P)
    at_P = np.where(counts_P > 0, at_P, 0)
    return found | {"low": short(low_P), "high": short(high_P), "at": at_P.tolist()}


def short(values: np.ndarray) -> list[float | int | None]:
    """The numbers with DIGITS digits, whole ones as integers; null for what is not finite."""
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 10**15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")
