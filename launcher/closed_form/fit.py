"""Constants of closed forms fitted to rows: least squares of the logarithm of the error, few outliers allowed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Priors = Mapping[str, tuple[float, float, str]]  # where it begins, standard deviation of its logarithm, meaning

ROUNDS = 60
EDGE = 0.12  # errors beyond count by their size, not by its square (Huber)


def fit(
    predict: Callable[[Mapping[str, float]], Any], measured: Any, publishers: Sequence[str], priors: Priors
) -> dict[str, float]:
    """The constants with which ``predict`` meets the measured values best.

    Each publisher weighs as the square root of its rows, and each constant is held to where it begins by its standard
    deviation: what no row tells of stays there. Gauss and Newton's steps over logarithms, with Levenberg's damping.
    """
    names = list(priors)
    first = np.log([priors[name][0] for name in names])
    spread = np.array([priors[name][1] for name in names])
    counts = {each: publishers.count(each) for each in set(publishers)}
    weight = np.array([counts[each] ** -0.5 for each in publishers])
    target = np.log(measured)
    at, damping = first.copy(), 1e-2

    def errors(logs: Any) -> Any:
        return np.log(predict(dict(zip(names, np.exp(logs), strict=True)))) - target

    def objective(logs: Any) -> float:
        size = np.abs(errors(logs)) / EDGE
        robust = np.where(size < 1, size**2, 2 * size - 1)
        return float((weight * robust).sum() + (((logs - first) / spread) ** 2).sum())

    best = objective(at)
    for _ in range(ROUNDS):
        now = errors(at)
        slope = np.stack([(errors(at + step) - now) / 1e-4 for step in np.eye(len(names)) * 1e-4], axis=1)
        strength = weight / np.maximum(EDGE**2, EDGE * np.abs(now))
        normal = slope.T @ (strength[:, None] * slope) + np.diag(spread**-2.0)
        gradient = slope.T @ (strength * now) + (at - first) / spread**2
        while damping < 1e6:
            tried = at - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            value = objective(tried)
            if value < best:
                break
            damping *= 10
        else:
            break
        gained, at, best, damping = best - value, tried, value, damping / 10
        if gained < 1e-11 * best:
            break
    return dict(zip(names, (float(each) for each in np.exp(at)), strict=True))
