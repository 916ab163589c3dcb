"""Shortens long curves without losing spikes: each bucket of updates keeps its mean, lowest and highest value.

Shape letters: N updates, P buckets.
"""

import math
from typing import Any

import numpy as np

DIGITS = 5  # significant digits of a drawn number


def bounds_of(n_updates: int, most: int) -> np.ndarray:
    """The index of each bucket's first update: int64 [P], P = min(n_updates, most) buckets of nearly equal size."""
    n_buckets = min(n_updates, most)
    return np.arange(n_buckets, dtype=np.int64) * n_updates // max(n_buckets, 1)


def bucketed(values_N: np.ndarray, bounds_P: np.ndarray) -> dict[str, list[Any]]:
    """The curve as the page draws it: ``mean``, and where buckets hold several updates ``low``, ``high`` and ``at``.

    ``at`` is the position of the highest value, counted from its bucket's first update. Values that are not finite are
    left out; a bucket with no finite value has None in ``mean``, ``low`` and ``high``.
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
    """The numbers rounded to DIGITS digits, whole ones as integers; None for NaN and infinities."""
    return [_short(value) for value in values.tolist()]


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 10**15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")
