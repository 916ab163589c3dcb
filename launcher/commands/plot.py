"""`roundtable plot RUN...`: one picture that compares runs.

Shape letters: N updates, P points or columns of a picture.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from launcher.commands.runs import RUNS_DIR, short_names
from launcher.console import in_a_line, say
from launcher.errors import UserError
from launcher.training.run_parts import METRICS, check_parts
from launcher.watch.metrics import read_metrics
from launcher.watch.moe import busiest_load
from launcher.watch.picture import check_picture, save_picture
from launcher.watch.plot import GRID, SMOOTHING_FRACTION, smooth

# Okabe and Ito's colors, told apart by color-blind readers too (jfly.uni-koeln.de/color), the darkest first. Further
# runs repeat them with other dashes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
MOST_POINTS = 2000  # of a line; more are averaged, since no screen shows them
WIDTH_INCHES, ROW_INCHES, LEGEND_LINE_INCHES = 12.0, 3.0, 0.24
WIDE_RATIO = 1e3  # of a logarithmic axis's ends; beyond it, labels between the powers of ten would overlap
LEGEND_LETTERS = 130  # letters that fit into a line of the legend
Axis = Literal["steps", "tokens"]


@dataclass
class Curves:
    """One run's numbers that are drawn, by metric."""

    name: str
    updates: dict[str, np.ndarray] = field(default_factory=dict)  # key -> values_N; NaN where a row lacks it
    evaluations: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Panel:
    """One pair of axes: the metric that it shows, and how it is drawn."""

    key: str
    title: str
    scale: Literal["linear", "log"] = "linear"
    smoothed: bool = False
    from_zero: bool = False


PANELS = (
    Panel("loss", "training loss (nats per token)", smoothed=True),
    Panel("eval_loss", "held-out loss (nats per token)"),
    Panel("grad_norm", "gradient norm", scale="log", smoothed=True),
    Panel("lr", "learning rate", from_zero=True),
    Panel("batch_size", "batch size (sequences)", from_zero=True),
    Panel("tokens_per_second", "tokens per second", smoothed=True, from_zero=True),
    Panel("load", "busiest expert's load (1 = balanced)", smoothed=True),
)


def plot_runs(names: Sequence[str], out: str | None, x: str) -> int:
    """Draws the runs into one picture and prints its path; returns 0.

    Raises UserError where a run has no metrics, the picture's ending is unknown, or its folder cannot be written.
    """
    if x not in ("steps", "tokens"):
        raise UserError([f"--x={x} must be steps or tokens; leave it out for steps"])
    axis: Axis = "tokens" if x == "tokens" else "steps"
    paths = [find_metrics(name) for name in names]
    target = Path(out) if out is not None else (paths[0].parent / "plot.png" if len(paths) == 1 else Path("plot.png"))
    check_picture(target, "--out", "plot.png")
    runs = [read_curves(path, name) for path, name in zip(paths, short_names(paths), strict=True)]
    if not any(_has(run, panel.key) for run in runs for panel in PANELS):
        raise UserError([f"RUN={names[0]} has no finite number to draw; see the events in its {METRICS}"])
    figure = draw_runs(runs, axis)
    save_picture(figure, target, "--out")
    say(str(target))
    return 0


def find_metrics(name: str) -> Path:
    """The metrics.jsonl of a run directory, or of a run's name below runs. Raises UserError where there is none."""
    folders = [folder for folder in (Path(name), Path(RUNS_DIR) / name) if folder.is_dir()]
    for folder in folders:
        check_parts(folder, METRICS)
        if (folder / METRICS).exists():
            return folder / METRICS
    if folders:
        raise UserError([f"RUN={name} has no {METRICS} yet; name a run that has trained at least one step"])
    raise UserError([f"RUN={name} must be a run directory, or a run's name below {RUNS_DIR}; see `roundtable runs`"])


def read_curves(path: Path, name: str) -> Curves:
    """The numbers to draw from a run's metrics.jsonl. Raises UserError where it holds no update."""
    rows = read_metrics(path)
    updates = [row for row in rows if "loss" in row]
    if not updates:
        raise UserError([f"{path} holds no update yet; plot the run after its first step"])
    tokens = {row["step"]: row.get("tokens", math.nan) for row in updates}
    evaluations = [row for row in rows if "eval_loss" in row and "loss" not in row]
    keys = ("step", "tokens", "loss", "grad_norm", "lr", "batch_size", "tokens_per_second")
    curves = Curves(name, {key: _column(row.get(key) for row in updates) for key in keys})
    curves.updates["load"] = _column(busiest_load(row) for row in updates)
    curves.evaluations = {
        "step": _column(row["step"] for row in evaluations),
        "tokens": _column(tokens.get(row["step"]) for row in evaluations),
        "eval_loss": _column(row["eval_loss"] for row in evaluations),
    }
    return curves


def _column(values: Iterable[Any]) -> np.ndarray:
    return np.array([value if isinstance(value, int | float) else math.nan for value in values], dtype=np.float64)


def draw_runs(runs: Sequence[Curves], x: Axis) -> Figure:
    """The figure, not yet written: one panel for each number that any of the runs has."""
    panels = [panel for panel in PANELS if any(_has(run, panel.key) for run in runs)]
    n_rows = math.ceil(len(panels) / 2)
    labels = labels_of(runs)
    legend_inches = 0.35 + LEGEND_LINE_INCHES * math.ceil(len(runs) / _legend_columns(labels))
    figure = Figure(
        figsize=(WIDTH_INCHES, n_rows * ROW_INCHES + legend_inches), layout="constrained", facecolor="white"
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(n_rows, 2 if len(panels) > 1 else 1, squeeze=False, sharex=True)
    for panel, axes in zip(panels, grid.flat, strict=False):
        _draw_panel(axes, panel, runs, x)
        axes.tick_params(labelbottom=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    grid.flat[0].set_xlim(*_limits(runs, x))
    _draw_legend(figure, labels)
    return figure


def _limits(runs: Sequence[Curves], x: Axis) -> tuple[float, float]:
    """The limits of the horizontal axis: the first and the last step (or token) of any run, with a margin."""
    at_N = np.concatenate([run.updates["step" if x == "steps" else "tokens"] for run in runs])
    low, high = (float(np.nanmin(at_N)), float(np.nanmax(at_N))) if np.isfinite(at_N).any() else (0.0, 1.0)
    margin = max(0.01 * (high - low), 1.0)
    return low - margin, high + margin


def _has(run: Curves, key: str) -> bool:
    values = run.evaluations.get(key) if key == "eval_loss" else run.updates.get(key)
    return values is not None and bool(np.isfinite(values).any())


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[Curves], x: Axis) -> None:
    """Draws one metric of all runs; a noisy one as a faint line, with its smoothed values as a strong line."""
    for number, run in enumerate(runs):
        if not _has(run, panel.key):
            continue
        rows = run.evaluations if panel.key == "eval_loss" else run.updates
        at_N, values_N = rows["step" if x == "steps" else "tokens"], rows[panel.key]
        if panel.scale == "log":
            values_N = np.where(values_N > 0, values_N, np.nan)
        style = style_of(number)
        marker = "o" if panel.key == "eval_loss" or len(values_N) < 3 else None
        window = int(len(values_N) * SMOOTHING_FRACTION)
        if panel.smoothed and window > 1:
            axes.plot(*_thin(at_N, values_N), color=style["color"], linewidth=0.7, alpha=0.25, zorder=1)
            values_N = smooth(values_N, window, steady_end=True)
        axes.plot(*_thin(at_N, values_N), **style, marker=marker, markersize=4, zorder=3)
    _dress(axes, panel, x)


def style_of(number: int) -> dict[str, Any]:
    """The color, dashes and width of a run's lines, by its number among the runs."""
    dashes = DASHES[number // len(COLORS) % len(DASHES)]
    return {"color": COLORS[number % len(COLORS)], "linestyle": dashes, "linewidth": 1.8}


def _thin(at_N: np.ndarray, values_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The line reduced to at most MOST_POINTS points; each is the mean of its neighbors' finite values, or NaN."""
    if len(at_N) <= MOST_POINTS:
        return at_N, values_N
    bounds = np.linspace(0, len(at_N), MOST_POINTS + 1).astype(int)[:-1]
    known_N = np.isfinite(values_N)
    counts_P = np.add.reduceat(known_N, bounds)
    sums_P = np.add.reduceat(np.where(known_N, values_N, 0.0), bounds)
    return at_N[bounds], np.where(counts_P > 0, sums_P / np.maximum(counts_P, 1), np.nan)


def _dress(axes: Axes, panel: Panel, x: Axis) -> None:
    """Sets a panel's title, grid, scale, and the numbers along its axes."""
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel("step" if x == "steps" else "tokens", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axes.set_yscale(panel.scale)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    if panel.scale == "log":
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: short(value) if _has_room(axes) else ""))
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(color=GRID, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(which="both", labelsize=9)


def _has_room(axes: Axes) -> bool:
    """Whether a logarithmic axis has room for numbers between the powers of ten."""
    low, high = axes.get_ylim()
    return high < WIDE_RATIO * low


def short(value: float) -> str:
    """A number on an axis: 0.0003, 12.5, 20k, 1.2B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def labels_of(runs: Sequence[Curves]) -> list[str]:
    """One legend label for each run: its name, last step, smoothed training loss and last held-out loss."""
    labels = []
    for run in runs:
        loss_N, step = run.updates["loss"], int(run.updates["step"][-1])
        loss = smooth(loss_N, int(len(loss_N) * SMOOTHING_FRACTION), steady_end=True)[-1]
        heldout_N = run.evaluations["eval_loss"]
        ends = f", held out {heldout_N[-1]:.3f}" if len(heldout_N) else ""
        labels.append(f"{in_a_line(run.name)}: step {step:,}, loss {loss:.3f}{ends}")
    return labels


def _legend_columns(labels: Sequence[str]) -> int:
    return max(1, min(len(labels), LEGEND_LETTERS // (max(map(len, labels)) + 5)))


def _draw_legend(figure: Figure, labels: Sequence[str]) -> None:
    """Draws the legend above the panels, runs row by row (matplotlib fills columns). ``$`` in a name is no formula."""
    columns = _legend_columns(labels)
    order = [number for column in range(columns) for number in range(column, len(labels), columns)]
    legend = figure.legend(
        [Line2D([], [], **style_of(number)) for number in order],
        [labels[number] for number in order],
        loc="outside upper left",
        ncols=columns,
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
