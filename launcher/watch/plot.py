"""Plots a run as one picture: losses, learning rate, and each MoE layer's expert load over the steps.

Shape letters: N updates, P columns of pixels, E experts.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from launcher.errors import UserError
from launcher.training.run_parts import METRICS, check_parts
from launcher.watch.metrics import read_metrics
from launcher.watch.moe import layer_of, load_keys

WIDTH_INCHES = 10.0
CURVES_INCHES = 4.2
MAP_INCHES = 1.75  # one row of heat maps
MAPS_PER_ROW = 4
MAX_COLUMNS = 400  # steps are averaged into at most so many columns of a heat map
SMOOTHING_FRACTION = 0.02  # the smoothed loss averages over this share of the updates
TRAIN, HELD_OUT, RATE, GRID = "#2f6f9f", "#c8553d", "#5b5b66", "#e4e4e8"


def plot_run(run_dir: Path | str, out_png: Path | str) -> None:
    """Writes the picture of the run in ``run_dir`` to ``out_png``. A dense run has no expert panels.

    Raises UserError where the run directory has no metrics.jsonl, or one without an update.
    """
    run_dir = Path(run_dir)
    check_parts(run_dir, METRICS)
    path = run_dir / METRICS
    if not path.exists():
        raise UserError([f"{path} does not exist; name the directory of a run that has trained at least one step"])
    rows = read_metrics(path)
    updates = [row for row in rows if "loss" in row]
    if not updates:
        raise UserError([f"{path} holds no update yet; plot the run after its first step"])
    evaluations = [row for row in rows if "eval_loss" in row]
    figure = draw(run_dir.absolute().name, updates, evaluations)
    figure.savefig(out_png, dpi=150)


def draw(name: str, updates: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> Figure:
    """The figure, not yet written: curves above, heat maps below where there are experts."""
    keys = next((keys for row in reversed(updates) if (keys := load_keys(row))), [])
    map_rows = math.ceil(len(keys) / MAPS_PER_ROW)
    maps_inches = map_rows * MAP_INCHES + 0.9 if keys else 0.0
    figure = Figure(figsize=(WIDTH_INCHES, CURVES_INCHES + maps_inches), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    heights = [CURVES_INCHES, maps_inches] if keys else [CURVES_INCHES]
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights, hspace=0.04)[:, 0]
    _draw_curves(parts[0], name, updates, evaluations)
    if keys:
        _draw_loads(parts[1], updates, keys)
    return figure


def average_columns(values_NE: np.ndarray, n_columns: int) -> np.ndarray:
    """The mean over each of P = min(n_columns, N) groups of successive updates of nearly equal size, as [P, E]."""
    groups = np.array_split(values_NE, min(n_columns, len(values_NE)))
    return np.stack([group.mean(axis=0) for group in groups])


def smooth(values_N: np.ndarray, window: int, *, steady_end: bool = False) -> np.ndarray:
    """The centered moving average of the values over ``window`` of them; NaNs and infinities are left out.

    Near the ends the window shrinks on both sides, so that a falling curve is not bent. With ``steady_end`` only the
    side past the end shrinks, so that the last values are still averaged and a flat curve does not end in noise.
    """
    finite_N = np.isfinite(values_N)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite_N, values_N, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite_N)])
    index_N = np.arange(len(values_N))
    before_N = np.minimum(index_N, window // 2)
    after_N = np.minimum(before_N, index_N[::-1])
    start_N, stop_N = index_N - (before_N if steady_end else after_N), index_N + after_N + 1
    total_N, n_N = sums[stop_N] - sums[start_N], counts[stop_N] - counts[start_N]
    return np.where(n_N > 0, total_N / np.maximum(n_N, 1), np.nan)


def numbers(updates: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """The values of ``key``, one for each update, as float64 [N]; NaN where an update lacks the key."""
    return np.array([row.get(key, math.nan) for row in updates], dtype=np.float64)


def _draw_curves(
    part: SubFigure, name: str, updates: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]
) -> None:
    loss_axes, rate_axes = part.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps = [row["step"] for row in updates]
    _draw_loss(loss_axes, steps, numbers(updates, "loss"), evaluations)
    loss_axes.set_title(
        f"{name}: step {steps[-1]:,}, {updates[-1].get('tokens', 0):,} tokens", loc="left", fontweight="bold"
    )
    rate_axes.plot(steps, numbers(updates, "lr"), color=RATE, linewidth=1.5, marker=_marker(steps))
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_ylim(bottom=0)
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    rate_axes.set_xlabel("step")
    if any("batch_size" in row for row in updates):
        _draw_batch_sizes(rate_axes.twinx(), steps, numbers(updates, "batch_size"))
    rate_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (loss_axes, rate_axes):
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        pad = max(0.01 * (steps[-1] - steps[0]), 0.5)
        axes.set_xlim(steps[0] - pad, steps[-1] + pad)


def _draw_batch_sizes(axes: Axes, steps: list[int], size_N: np.ndarray) -> None:
    axes.plot(steps, size_N, color=HELD_OUT, linewidth=1.2, drawstyle="steps-mid")
    axes.set_ylabel("sequences", color=HELD_OUT)
    axes.set_ylim(bottom=0)
    axes.spines["top"].set_visible(False)


def _draw_loss(axes: Axes, steps: list[int], loss_N: np.ndarray, evaluations: Sequence[Mapping[str, Any]]) -> None:
    window = int(len(steps) * SMOOTHING_FRACTION)
    if window > 1:
        axes.plot(steps, loss_N, color=TRAIN, linewidth=0.8, alpha=0.35)
        axes.plot(steps, smooth(loss_N, window), color=TRAIN, linewidth=1.8, label="train")
    else:
        axes.plot(steps, loss_N, color=TRAIN, linewidth=1.8, label="train", marker=_marker(steps))
    if evaluations:
        eval_steps = [row["step"] for row in evaluations]
        eval_losses = [row["eval_loss"] for row in evaluations]
        label = f"held out ({eval_losses[-1]:.3f} at step {eval_steps[-1]:,})"
        axes.plot(eval_steps, eval_losses, color=HELD_OUT, marker="o", markersize=5, linewidth=1.2, label=label)
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False)


def _marker(steps: list[int]) -> str | None:
    """The marker of a curve's points: "o" where there are too few steps for a line, else None."""
    return "o" if len(steps) < 3 else None


def _draw_loads(part: SubFigure, updates: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """One heat map for each MoE layer: steps to the right, experts upward, load as color (white is balanced).

    Updates whose rows lack the shares are left out; the remaining ones are drawn at equal distances.
    """
    with_load = [row for row in updates if all(key in row for key in keys)]
    loads = [np.array([row[key] for row in with_load]) for key in keys]
    columns = [average_columns(shares_NE * shares_NE.shape[1], MAX_COLUMNS) for shares_NE in loads]
    highest = max(2.0, min(float(max(map_PE.max() for map_PE in columns)), 4.0))
    norm = TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=highest)
    n_columns = min(MAPS_PER_ROW, len(keys))
    n_rows = math.ceil(len(keys) / n_columns)
    grid = part.subplots(n_rows, n_columns, squeeze=False, sharex=True, sharey=True)
    first, last = with_load[0]["step"], with_load[-1]["step"]
    for index, (axes, key, map_PE) in enumerate(zip(grid.flat, keys, columns, strict=False)):
        n_experts = map_PE.shape[1]
        extent = (first - 0.5, last + 0.5, -0.5, n_experts - 0.5)
        axes.imshow(
            map_PE.T, aspect="auto", origin="lower", cmap="RdBu_r", norm=norm, extent=extent, interpolation="nearest"
        )
        axes.set_title(f"layer {layer_of(key)}", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axes.tick_params(labelsize=8, labelbottom=index >= len(keys) - n_columns)
    for axes in grid.flat[len(keys) :]:
        axes.set_visible(False)
    ticks = [0.0, 0.5, 1.0, 1.5, *range(2, int(highest) + 1)]
    bar = part.colorbar(
        ScalarMappable(norm, "RdBu_r"), ax=grid, extend="max", ticks=ticks, pad=0.01, aspect=20 * n_rows
    )
    bar.set_label("load (1 = balanced)", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    part.suptitle("Share of tokens by expert", x=0.01, ha="left", fontweight="bold")
    part.supxlabel("step", fontsize=10)
    part.supylabel("expert", fontsize=10)
