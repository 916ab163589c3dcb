"""The coordinate check as one picture: sizes over the width, a line for each number of updates.

Shape letters: W widths, T updates made (from 0).
"""

from collections.abc import Mapping

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from launcher.coords.judge import Slopes
from launcher.coords.measure import PARAMETRIZATIONS, Coordinates, Parametrization
from launcher.watch.plot import GRID

PANEL_INCHES = 2.5
NAMES: Mapping[Parametrization, str] = {"mup": "muP", "standard": "standard"}
TITLES = {
    "embed": "embedding",
    "embed_positions": "learned positions",
    "embed_norm": "normed embedding",
    "attention": "attention output",
    "feed_forward": "feed-forward output",
    "router": "router logits",
    "logits": "logits",
}
KINDS = ("sizes", "changes")


def draw(title: str, measured: Mapping[Parametrization, Coordinates], slopes: Slopes) -> Figure:
    """The figure: a column for each activation; rows: sizes under muP and standard, then changes since step 0."""
    columns = list(next(iter(measured.values())).sizes)
    rows: list[tuple[str, Parametrization]]
    rows = [(kind, each) for kind in KINDS for each in PARAMETRIZATIONS if each in measured]
    figure = Figure(
        figsize=(PANEL_INCHES * len(columns) + 0.9, 2.2 * len(rows) + 1.1), layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True)
    for row, (kind, each) in enumerate(rows):
        coordinates = measured[each]
        for column, name in enumerate(columns):
            axes = grid[row, column]
            draw_panel(axes, coordinates.widths, getattr(coordinates, kind)[name], first=KINDS.index(kind))
            slope = slopes[each][name][kind]
            axes.set_title(f"slope {slope:+.2f}", fontsize=9, loc="right", color="#444444")
            if row == 0:
                axes.annotate(
                    TITLES.get(name, name), (0.5, 1.2), xycoords="axes fraction", ha="center", fontweight="bold"
                )
            if row == len(rows) - 1:
                axes.set_xlabel("d_model (channels)")
        what = "mean |x|" if kind == "sizes" else "mean |x - x at update 0|"
        grid[row, 0].set_ylabel(f"{NAMES[each]}\n{what}")
    for column in range(len(columns)):
        for pair in (grid[: len(measured), column], grid[len(measured) :, column]):
            share_limits(list(pair))
    figure.suptitle(title, fontweight="bold")
    steps = len(next(iter(next(iter(measured.values())).sizes.values()))) - 1
    handles = [Line2D([], [], color=color_of(step, steps), marker="o", markersize=4) for step in range(steps + 1)]
    labels = [f"{step} updates" if step != 1 else "1 update" for step in range(steps + 1)]
    figure.legend(handles, labels, loc="outside lower center", ncols=min(9, steps + 1), frameon=False)
    return figure


def draw_panel(axes: Axes, widths: tuple[int, ...], values_TW: np.ndarray, *, first: int) -> None:
    """Draws one activation under one parametrization: a line over the widths for each step from ``first`` on."""
    steps = len(values_TW) - 1
    for step in range(first, steps + 1):
        axes.plot(widths, values_TW[step], color=color_of(step, steps), marker="o", markersize=3.5, linewidth=1.4)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(widths, [str(width) for width in widths], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def share_limits(panels: list[Axes]) -> None:
    """Gives the panels one range of sizes, at least a factor of ten: in a narrower one noise looks like growth."""
    low = min(axes.get_ylim()[0] for axes in panels)
    high = max(axes.get_ylim()[1] for axes in panels)
    missing = max(1.2, 10 / (high / low)) ** 0.5
    for axes in panels:
        axes.set_ylim(low / missing, high * missing)


def color_of(step: int, steps: int) -> tuple[float, float, float, float]:
    """The curve's colour, darker with each update."""
    return colormaps["viridis_r"](0.15 + 0.85 * step / max(1, steps))
