"""A picture of tensors' memory over a step: stacked by purpose, with the peak marked and its parts named."""

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launcher.tables import size_text
from launcher.trace.recorder import HOLDERS, Memory

MEMORY = "memory.png"  # the picture's file name
MOST_POINTS = 2000  # the most moments that are drawn
COLORS = {
    "weights": "#4477aa",
    "masters": "#66ccee",
    "optimizer state": "#228833",
    "gradients": "#ccbb44",
    "activations": "#ee6677",
    "backward": "#aa3377",
    "other": "#bbbbbb",
}
LABELS = {
    "gradients": "gradients and their buffers",
    "backward": "made in the backward pass",
    "activations": "made in the forward pass (activations)",
}
SHADES = {"forward": "#ffffff", "backward": "#f2f2f2", "recompute": "#f2f2f2", "update": "#e4e4e4"}
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
ROOM = 1.18  # height of the axes over the peak, which leaves room for text
LETTER_WIDTH = 0.0105  # of a phase's name, as a share of the picture's width: too narrow phases get no name


def draw_memory(title: str, memory: Memory, time_label: str) -> Figure:
    """The figure of memory over time, stacked by purpose."""
    kept = chosen(memory)
    seconds = np.array([memory.times[at] for at in kept])
    scale, unit = unit_of(memory.peak_bytes)
    factor, time_unit = (1.0, "s") if seconds[-1] >= 10 else (1e3, "ms")
    holders = [holder for holder in HOLDERS if any(memory.held[at][holder] for at in kept)]
    rows = [np.array([max(0, memory.held[at][holder]) for at in kept]) / scale for holder in holders]
    figure = Figure(figsize=(10, 5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    shade_phases(axes, seconds * factor, [memory.phases[at] for at in kept])
    labels = [LABELS.get(holder, holder) for holder in holders]
    axes.stackplot(
        seconds * factor, *rows, labels=labels, colors=[COLORS[holder] for holder in holders], step="post", lw=0
    )
    axes.set_xlim(0, float(seconds[-1]) * factor)
    axes.set_ylim(0, memory.peak_bytes / scale * ROOM)
    axes.set_xlabel(f"{time_label} ({time_unit})")
    axes.set_ylabel(f"bytes of tensors ({unit})")
    axes.set_title(f"{title}\n{peak_words(memory)}", fontsize=10, loc="left")
    axes.grid(axis="y", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    mark_peak(axes, memory, factor, scale)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    return figure


def unit_of(n_bytes: int) -> tuple[int, str]:
    """The largest unit that is not larger than ``n_bytes``: its bytes and its name."""
    return next(((size, name) for size, name in UNITS if n_bytes >= size), (1, "bytes"))


def chosen(memory: Memory) -> list[int]:
    """The indices of the moments to draw: the fullest of each of at most MOST_POINTS equal stretches, and both ends.

    So the peak is among them.
    """
    n = len(memory.times)
    totals = np.array([sum(now.values()) for now in memory.held])
    bounds = np.unique(np.linspace(0, n, min(n, MOST_POINTS) + 1).astype(int))
    middle = [int(first + np.argmax(totals[first:last])) for first, last in itertools.pairwise(bounds)]
    return sorted({0, *middle, n - 1})


def shade_phases(axes: Axes, times: np.ndarray, phases: Sequence[str]) -> None:
    """Draws a shade, and a name at the top, for each stretch of time in one phase."""
    begin = 0
    for at in range(1, len(phases) + 1):
        if at < len(phases) and shade(phases[at]) == shade(phases[begin]):
            continue
        first, last = times[begin], times[min(at, len(times) - 1)]
        axes.axvspan(first, last, color=shade(phases[begin]), lw=0, zorder=0)
        name = "backward" if phases[begin] == "recompute" else phases[begin]
        if last - first >= len(name) * LETTER_WIDTH * times[-1]:
            axes.text((first + last) / 2, 0.985, name, transform=axes.get_xaxis_transform(), ha="center", va="top",
                      fontsize=8, color="#666666")  # fmt: skip
        begin = at


def shade(phase: str) -> str:
    """The color behind a phase; recomputation is part of the backward pass."""
    return SHADES[phase]


def mark_peak(axes: Axes, memory: Memory, factor: float, scale: int) -> None:
    """Draws a mark with the number of bytes at the peak."""
    at = memory.peak_seconds * factor
    is_right = at > sum(axes.get_xlim()) / 2
    axes.plot([at], [memory.peak_bytes / scale], "v", color="black", ms=6)
    axes.annotate(
        f"peak {size_text(memory.peak_bytes)}",
        (at, memory.peak_bytes / scale),
        xytext=(-8 if is_right else 8, 8),
        textcoords="offset points",
        ha="right" if is_right else "left",
        fontsize=9,
        fontweight="bold",
    )


def peak_words(memory: Memory) -> str:
    """The peak and its four largest parts in words, the largest first."""
    largest = sorted(memory.at_peak.items(), key=lambda each: -each[1])
    held = [f"{LABELS.get(holder, holder).partition(' (')[0]} {size_text(n_bytes)}" for holder, n_bytes in largest[:4]]
    return f"peak {size_text(memory.peak_bytes)}: {', '.join(held)}"
