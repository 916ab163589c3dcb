"""Fitting the constants of closed forms to rows, by robust least squares of log(plan / measurement)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Priors = Mapping[str, tuple[float, float, str]]  # initial value, standard deviation of its logarithm, meaning

ROUNDS = 60
EDGE = 0.12  # errors beyond it count linearly instead of by their square (Huber)


def fit(
    predict: Callable[[Mapping[str, float]], Any], measured: Any, publishers: Sequence[str], priors: Priors
) -> dict[str, float]:
    """The constants with which ``predict`` fits the measured values best, by name.

    Each publisher has the weight of the square root of its number of rows. Each constant has a log-normal prior around
    its initial value, where it stays if no row depends on it. Gauss-Newton steps over logarithms, with
    Levenberg-Marquardt damping.
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
