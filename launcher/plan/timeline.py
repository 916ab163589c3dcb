"""One planned step as a picture: a row for each pipeline position, with a bar for each of its passes over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from launcher.plan.report import Bar
from launcher.watch.picture import save_picture

COLORS = {"F": "#4477aa", "B": "#ee6677", "I": "#ccbb44", "W": "#228833", "update": "#aa3377"}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward: of inputs",
    "W": "backward: of weights",
    "update": "sums over the replicas, optimizer",
}
LATER = 0.45  # how much lighter the last stage is than the first: with a V or chunks a rank holds several stages
HEIGHT = 0.8  # of a bar, in a row of height 1
MOST_NUMBERED = 400  # the most passes that show their micro-batch's number; more have no room for it
MOST_SHAPES = 20_000  # the most shapes that a browser shows with ease; more become a bitmap within the SVG
WIDTH, LEAST_HEIGHT, LINE_HEIGHT = 12.0, 2.2, 0.45  # inches
DIGIT = 0.07  # width of a digit in inches
DPI = 150


def save_timeline(plan: dict[str, Any], rows: Sequence[Sequence[Bar]], target: Path) -> None:
    """Draws the step into ``target``. Raises UserError where it cannot be written."""
    save_picture(draw_timeline(plan, rows), target, "--timeline")


def draw_timeline(plan: dict[str, Any], rows: Sequence[Sequence[Bar]]) -> Figure:
    """The picture of the pipeline's passes over time."""
    scale, unit = (1.0, "s") if plan["step_seconds"] >= 1 else (1e3, "ms")
    figure = Figure(figsize=(WIDTH, LEAST_HEIGHT + LINE_HEIGHT * len(rows)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    n_stages = 1 + max(each[1] for row in rows for each in row)
    n_bars = sum(map(len, rows))
    digit = plan["step_seconds"] * scale * DIGIT / WIDTH
    for place, row in enumerate(rows):
        draw_row(axes, place, row, n_stages, scale, digit if n_bars <= MOST_NUMBERED else None)
    for each in axes.collections:
        each.set_rasterized(n_bars > MOST_SHAPES)
    axes.set_xlim(0, plan["step_seconds"] * scale)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [f"position {place}" for place in range(len(rows))])
    shades = "; the later a position's stage, the lighter" if n_stages > len(rows) else ""
    numbers = "; numbers are micro-batches" if n_bars <= MOST_NUMBERED else ""
    axes.set_xlabel(f"planned time ({unit}){numbers}{shades}")
    idle = f", idle {plan['bubble_share']:.1%} of the passes" if len(rows) > 1 else ""
    figure.suptitle(
        f"{plan['name']} on {plan['gpus']:,} {plan['gpu']}: one step, planned, {plan['step_seconds'] * scale:,.4g} "
        f"{unit}, {plan['micro_batches']} micro-batches{idle}",
        fontsize=10,
    )
    kinds = [kind for kind in COLORS if any(each[0] == kind for row in rows for each in row)]
    handles = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    return figure


def draw_row(axes: Axes, place: int, row: Sequence[Bar], n_stages: int, scale: float, digit: float | None) -> None:
    """Draws one position's passes. ``digit`` is a digit's width on the time axis, which decides where a number fits.

    With None no pass is numbered.
    """
    top, bottom = place - HEIGHT / 2, place + HEIGHT / 2
    corners = [
        ((begin * scale, top), (end * scale, top), (end * scale, bottom), (begin * scale, bottom))
        for *_, begin, end in row
    ]
    colors = [shade(kind, stage, n_stages) for kind, stage, *_ in row]
    axes.add_collection(PolyCollection(corners, facecolors=colors, edgecolors="white", linewidths=0.4))
    if digit is None:
        return
    for kind, _, number, begin, end in row:
        if kind != "update" and (end - begin) * scale >= digit * len(str(number)):
            middle = (begin + end) / 2 * scale
            axes.text(middle, place, str(number), ha="center", va="center", fontsize=6, color="white", clip_on=True)


def shade(kind: str, stage: int, n_stages: int) -> tuple[float, float, float]:
    """The color (red, green, blue) of a pass of this kind: the later its stage, the lighter."""
    red, green, blue = (int(COLORS[kind][at : at + 2], 16) / 255 for at in (1, 3, 5))
    light = LATER * max(0, stage) / max(1, n_stages - 1)
    return red + (1 - red) * light, green + (1 - green) * light, blue + (1 - blue) * light
