"""PNG pictures of the findings. Dollar signs in tokens are not parsed as mathematics, and no font is downloaded.

Shape letters: S sequence, L layers, E experts, N sources.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import PowerNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from launcher.console import in_a_line
from launcher.inspection.experts import tokens_of

MAPS_PER_ROW = 4
MAP_INCHES = 2.5
MOST_LABELS = 48  # the most tokens that an axis labels
LONGEST_LABEL, LONGEST_NAME = 12, 40  # the most letters of a token, and of a text's or source's name
COLORS = "viridis"
DPI = 150
ROOT = 0.5  # exponent of the colour scale: most weights are small
STRONGEST = 0.99  # weights from this quantile of a layer's weights on have the strongest colour


def draw_all(report: Mapping[str, Any], folder: Path) -> list[str]:
    """Draws every picture into the folder; returns their names."""
    names = []
    for number, text in enumerate(report["texts"], 1):
        for layer in text.get("attention", ()):
            name = f"attention-text{number}-layer{layer['layer']:02d}.png"
            save(draw_attention(text, layer), folder / name)
            names.append(name)
        if "lens" in text and len(text["tokens"]) > 1:
            name = f"lens-text{number}.png"
            save(draw_lens(text), folder / name)
            names.append(name)
    for layer in report.get("experts", {}).get("layers", ()):
        name = f"experts-layer{layer['layer']:02d}.png"
        save(draw_experts(report["experts"], layer), folder / name)
        names.append(name)
    return names


def save(figure: Figure, path: Path) -> None:
    """Saves the figure. Letters that the font lacks become boxes, without a warning for each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(path, dpi=DPI)


def new_figure(width: float, height: float) -> Figure:
    """An empty white figure of this size in inches, which needs no display."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def label(text: str) -> str:
    """A token's text as a label of an axis: short, in one line, its spaces visible."""
    return called(text, LONGEST_LABEL).replace(" ", "␣")


def called(name: str, most: int = LONGEST_NAME) -> str:
    """A name in one line, shortened to at most ``most`` letters."""
    line = in_a_line(name)
    return line if len(line) <= most else f"{line[: most - 1]}…"


def name_tokens(axes: Axes, texts: Sequence[str], *, x: bool = True, y: bool = False, size: float = 5) -> None:
    """Labels the axes with tokens, where there are few enough of them."""
    if len(texts) > MOST_LABELS:
        return
    labels = [label(each) for each in texts]
    if x:
        axes.set_xticks(range(len(texts)), labels, rotation=90, fontsize=size, parse_math=False)
    if y:
        axes.set_yticks(range(len(texts)), labels, fontsize=size, parse_math=False)


def full_map(head: Mapping[str, Any]) -> np.ndarray:
    """The weights (S, S) of a head, NaN where a key comes after the query."""
    weights_SS = np.full((len(head["weights"]),) * 2, np.nan)
    for query, row in enumerate(head["weights"]):
        weights_SS[query, : query + 1] = np.array(row, np.float64)
    return weights_SS


def strongest(maps: Sequence[np.ndarray]) -> float:
    """The weight that gets the strongest colour, as do all larger ones."""
    weights = np.sort(np.concatenate([each[np.isfinite(each)] for each in maps]))
    return float(weights[int(STRONGEST * (len(weights) - 1))]) or 1.0 if len(weights) else 1.0


def draw_attention(text: Mapping[str, Any], layer: Mapping[str, Any]) -> Figure:
    """A figure with a map for each head of a layer, in one colour scale. Tokens are labelled left and at the bottom."""
    heads, n_tokens = layer["heads"], len(text["tokens"])
    n_columns = min(MAPS_PER_ROW, len(heads))
    n_rows = -(-len(heads) // n_columns)
    inches = MAP_INCHES if n_tokens <= 16 or n_tokens > MOST_LABELS else 1.6 * MAP_INCHES
    figure = new_figure(inches * n_columns + 0.8, inches * n_rows + 0.7)
    maps = [full_map(head) for head in heads]
    norm = PowerNorm(ROOT, 0, strongest(maps))
    grid = figure.subplots(n_rows, n_columns, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(heads):
            axes.set_axis_off()
            continue
        axes.imshow(maps[place], cmap=COLORS, norm=norm, interpolation="nearest")
        axes.set_title(f"head {heads[place]['head']}", fontsize=8)
        axes.tick_params(labelsize=6)
        is_left, is_bottom = place % n_columns == 0, place + n_columns >= len(heads)
        if n_tokens <= MOST_LABELS:
            axes.set(xticks=[], yticks=[])
            name_tokens(axes, text["token_texts"], x=is_bottom, y=is_left)
    window = "" if layer["window"] is None else f", window {layer['window']}"
    title = f"{called(text['name'])}, layer {layer['layer']}{window}: queries down, keys across"
    figure.suptitle(title, fontsize=9, parse_math=False)
    figure.colorbar(ScalarMappable(norm, COLORS), ax=grid, shrink=0.6, label="weight", extend="max")
    return figure


def draw_lens(text: Mapping[str, Any]) -> Figure:
    """A figure of the probability that each layer would give to each next token of the text."""
    probabilities_LS = np.array([row["next_probability"] for row in text["lens"]], np.float64)
    n_rows, n_columns = probabilities_LS.shape
    figure = new_figure(min(14.0, max(5.0, 0.22 * n_columns + 2)), min(12.0, 0.28 * n_rows + 2))
    (axes,) = figure.subplots(1, 1, squeeze=False).flat
    norm = PowerNorm(ROOT, 0, 1)
    axes.imshow(probabilities_LS, cmap=COLORS, norm=norm, aspect="auto", interpolation="nearest", origin="lower")
    every = max(1, -(-n_rows // 32))
    names = ["embedding" if row["layer"] is None else str(row["layer"]) for row in text["lens"]]
    axes.set_yticks(range(0, n_rows, every), names[::every], fontsize=7)
    axes.set_ylabel("after layer", fontsize=8)
    name_tokens(axes, text["token_texts"][1:], size=6)
    title = f"{called(text['name'])}: probability of each token, given those before it"
    axes.set_title(title, fontsize=9, parse_math=False)
    figure.colorbar(ScalarMappable(norm, COLORS), ax=axes)
    return figure


def draw_experts(experts: Mapping[str, Any], layer: Mapping[str, Any]) -> Figure:
    """A figure for one layer: which experts share tokens, and the load of each expert by source."""
    counts_NE = np.array(layer["source_counts"], np.float64)
    pairs_EE = np.array(layer["pairs"], np.float64)
    loads_NE = counts_NE / np.maximum(1, counts_NE.sum(1, keepdims=True)) * counts_NE.shape[1]
    together_EE = pairs_EE / np.maximum(1, tokens_of(pairs_EE))[:, None]
    np.fill_diagonal(together_EE, np.nan)
    figure = new_figure(10.0, 4.4)
    left, right = figure.subplots(1, 2)
    image = left.imshow(together_EE, cmap=COLORS, vmin=0, interpolation="nearest")
    left.set_title(
        f"layer {layer['layer']}: of the tokens of the expert down,\nthe part that goes to that across, too", fontsize=9
    )
    figure.colorbar(image, ax=left, shrink=0.8)
    even = TwoSlopeNorm(1, 0, max(2.0, float(loads_NE.max())))
    image = right.imshow(loads_NE, cmap="PuOr_r", norm=even, aspect="auto", interpolation="nearest")
    right.set_title("load of each expert by source (1: even)", fontsize=9)
    right.set_xlabel("expert", fontsize=8)
    right.set_yticks(
        range(len(counts_NE)), [called(each, 20) for each in experts["sources"]], fontsize=7, parse_math=False
    )
    figure.colorbar(image, ax=right, shrink=0.8)
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return figure
