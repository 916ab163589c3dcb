"""Text renderings of numbers: sparklines, load bars and durations. Pure functions, shared by both terminal views."""

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-:=+*#"  # for a terminal whose encoding lacks the blocks


def sparkline(values: Sequence[float], width: int, bars: str = BARS) -> str:
    """The values as one line of at most ``width`` bars, scaled from the lowest to the highest.

    More values than bars are averaged in groups; a group whose mean is NaN or infinite is shown as ``x``.
    """
    means = [_mean(part) for part in split_evenly(values, width)]
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return "x" * len(means)
    low, high = min(finite), max(finite)
    span = high - low
    return "".join(
        "x" if not math.isfinite(value) else _bar((value - low) / span if span else 0.0, bars) for value in means
    )


def load_bars(shares: Sequence[float], width: int) -> list[float]:
    """The load of each expert (share times number of experts; 1 is balanced), in at most ``width`` cells.

    Where there are more experts than cells, a cell shows the load in its group that is furthest from 1 on a log scale.
    """
    loads = [share * len(shares) for share in shares]
    return [max(part, key=lambda load: abs(math.log(max(load, 1e-3)))) for part in split_evenly(loads, width)]


def load_bar(load: float, bars: str = BARS) -> str:
    """One cell for one load: half height at 1 (balanced), full at 2 or more."""
    return _bar(load / 2, bars)


def split_evenly(values: Sequence[float], n_parts: int) -> list[Sequence[float]]:
    """The values in order, cut into min(n_parts, len(values)) parts whose lengths differ by at most one."""
    n = min(n_parts, len(values))
    return [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]


def duration(seconds: float) -> str:
    """A duration as people read it, rounded to whole seconds: 0:42, 12:03, 3:07:00, 2d 4:00:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02d}:{second:02d}"
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


def _bar(fraction: float, bars: str) -> str:
    return bars[min(max(int(fraction * len(bars)), 0), len(bars) - 1)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
