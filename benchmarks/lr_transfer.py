"""Measures whether the best learning rate stays the same for wider models, with muP and without. Prints one JSON line.

    python benchmarks/lr_transfer.py [--steps 80] [--widths 32,64,128,256] [--plot lr_transfer.png]

A small decoder of each width is trained by AdamW at each learning rate, in fp32, on the same windows of the demo's text
(the Python standard library's files as bytes). The loss shown is the mean training loss over the last LAST updates.
muP's base model is the narrowest one, where both parametrizations are the same model.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from launcher.prove.reference import PlainBatch, ReferenceTrainer
from launcher.watch.plot import GRID
from modeling.config import ModelConfig
from modeling.init_config import DepthScaledInit, MupInit
from modeling.optimizers.config import AdamWConfig
from modeling.schedules import CosineSchedule, lr_factor
from positions import draw_windows, files

SEQ_LEN, BATCH, LAST, D_HEAD = 64, 8, 20, 16
LOG2_RATES = range(-9, -3)
COLORS = ("#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#000000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--widths", default="32,64,128,256")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    widths = [int(width) for width in arguments.widths.split(",")]
    texts = files(is_heldout=False)
    losses: dict[str, dict[int, list[float | None]]] = {}
    for kind in ("mup", "standard"):
        for width in widths:
            is_again = kind == "standard" and width == widths[0]  # the same model as with muP
            losses.setdefault(kind, {})[width] = (
                losses["mup"][width] if is_again else sweep(model_of(width, widths[0], kind), texts, arguments.steps)
            )
    if arguments.plot is not None:
        draw(losses, arguments.plot)
    best = {kind: {width: best_rate(row) for width, row in rows.items()} for kind, rows in losses.items()}
    told = {"steps": arguments.steps, "log2_rates": [*LOG2_RATES], "best_log2_rate": best, "losses": losses}
    print(json.dumps({"benchmark": "lr_transfer", **told}))


def model_of(width: int, base: int, kind: str) -> ModelConfig:
    """The config of a decoder of two layers with heads of D_HEAD channels; ``kind`` is mup or standard."""
    heads = width // D_HEAD
    return ModelConfig(
        family="llama",
        vocab_size=256,
        d_model=width,
        n_layers=2,
        n_heads=heads,
        n_kv_heads=heads,
        d_ff=4 * width,
        init_std=base**-0.5,
        init=MupInit(base_d_model=base) if kind == "mup" else DepthScaledInit(),
    )


def sweep(config: ModelConfig, texts: list[np.ndarray], steps: int) -> list[float | None]:
    """The loss at each learning rate; None where it is not finite."""
    return [trained_loss(config, AdamWConfig(lr=2.0**power), texts, steps) for power in LOG2_RATES]


def trained_loss(config: ModelConfig, rule: AdamWConfig, texts: list[np.ndarray], steps: int) -> float | None:
    """The mean training loss of the last LAST updates, None where not finite; every model sees the same windows."""
    trainer = ReferenceTrainer(config, replace(rule, clip_norm=1.0), seed=0)
    schedule, random = CosineSchedule(warmup_steps=steps // 10), np.random.default_rng(1)
    seen = []
    for step in range(1, steps + 1):
        tokens_BS = draw_windows(texts, BATCH, SEQ_LEN + 1, random)
        inputs_BS = tokens_BS[:, :-1].contiguous()
        positions_BS = torch.arange(SEQ_LEN).expand_as(inputs_BS).contiguous()
        batch = PlainBatch(inputs_BS, tokens_BS[:, 1:].contiguous(), positions_BS, torch.zeros_like(inputs_BS))
        seen.append(trainer.step([batch], rule.lr * lr_factor(schedule, step, steps)).loss)
    loss = sum(seen[-LAST:]) / LAST
    return round(loss, 4) if math.isfinite(loss) else None


def best_rate(row: list[float | None]) -> int:
    """The exponent of the learning rate with the lowest loss."""
    return min((loss, power) for loss, power in zip(row, LOG2_RATES, strict=True) if loss is not None)[1]


def draw(losses: dict[str, dict[int, list[float | None]]], path: Path) -> None:
    """Plots loss over learning rate to ``path``, a line for each width, with muP beside the standard."""
    figure = Figure(figsize=(9.0, 4.0), layout="constrained", facecolor="white")
    panels = FigureCanvasAgg(figure).figure.subplots(1, 2, sharey=True)
    for axes, (kind, rows) in zip(panels, losses.items(), strict=True):
        for (width, row), color in zip(rows.items(), COLORS, strict=False):
            known = [(2.0**power, loss) for power, loss in zip(LOG2_RATES, row, strict=True) if loss is not None]
            axes.plot(*zip(*known, strict=True), marker="o", markersize=4, color=color, label=f"d_model {width}")
            axes.plot(*min(known, key=lambda point: point[1]), marker="*", markersize=14, color=color)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("peak learning rate (of the base model)" if kind == "mup" else "peak learning rate")
        axes.set_title("muP" if kind == "mup" else "standard", fontweight="bold")
        axes.grid(color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"training loss, last {LAST} updates (nats per byte)")
    panels[0].legend(frameon=False, fontsize=9)
    lowest = min(loss for rows in losses.values() for row in rows.values() for loss in row if loss is not None)
    panels[0].set_ylim(lowest - 0.1, lowest + 0.7)
    figure.suptitle("Loss after training at each learning rate (star: the best)")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
