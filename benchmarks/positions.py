"""Measures how each position encoding works on texts longer than those it was trained on. Prints one JSON line.

    python benchmarks/positions.py [--steps 200] [--seeds 1] [--plot positions.png]

One small decoder for each scheme is trained in fp32 on the demo's text, the Python standard library's files (here as
bytes, so that no tokenizer is needed), in windows of SEQ_LEN bytes. Held-out files then give windows of four times that
length, of which the last TARGETS bytes are predicted after contexts of different lengths. Since the targets are the
same ones, a scheme that extrapolates loses nothing by a longer context. A learned table has no row beyond its length.
"""

import argparse
import json
import sysconfig
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from launcher.watch.plot import GRID
from modeling.config import ModelConfig
from modeling.context import Context
from modeling.decoder import Decoder, build_decoder
from modeling.init import materialize
from modeling.loss import IGNORE
from modeling.optimizers.config import AdamWConfig
from modeling.rope_scaling import DynamicScaling
from modeling.schedules import CosineSchedule, lr_factor

SEQ_LEN = 128
LENGTHS = (SEQ_LEN, 2 * SEQ_LEN, 4 * SEQ_LEN)
TARGETS = 64
BATCH, HELD_OUT = 16, 256  # windows
BASE = ModelConfig(
    family="none",
    vocab_size=256,
    d_model=96,
    n_layers=4,
    n_heads=4,
    n_kv_heads=4,
    d_ff=256,
    tie_embeddings=True,
)
SCHEMES = {
    "rope": BASE,
    "rope, every 2nd layer": replace(BASE, nope_layers=(1, 3)),
    "alibi": replace(BASE, positions="alibi"),
    "t5": replace(BASE, positions="t5"),
    "sinusoidal": replace(BASE, positions="sinusoidal"),
    "learned": replace(BASE, positions="learned", max_positions=SEQ_LEN),
    "none": replace(BASE, positions="none"),
}
DYNAMIC = DynamicScaling(factor=4.0, original_seq_len=SEQ_LEN)  # changes nothing of how rope is trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train, heldout = files(is_heldout=False), files(is_heldout=True)
    windows_NS = draw_windows(heldout, HELD_OUT, max(LENGTHS) + 1, np.random.default_rng(0))
    runs: dict[str, list[list[float | None]]] = {}
    for name, config in SCHEMES.items():
        for seed in range(arguments.seeds):
            model = trained(config, train, arguments.steps, seed)
            runs.setdefault(name, []).append(evaluated(model, config, windows_NS))
            if name == "rope":
                scaled = replace(config, rope_scaling=DYNAMIC)
                again = build_decoder(scaled)
                again.load_state_dict(model.state_dict())
                runs.setdefault("rope, dynamic", []).append(evaluated(again, scaled, windows_NS))
    losses = {name: [mean(values) for values in zip(*rows, strict=True)] for name, rows in runs.items()}
    if arguments.plot is not None:
        draw(losses, arguments.plot)
    told = {"seq_len": SEQ_LEN, "lengths": LENGTHS, "targets": TARGETS * HELD_OUT, "steps": arguments.steps}
    print(json.dumps({"benchmark": "positions", **told, "seeds": arguments.seeds, "losses": losses}))


def files(*, is_heldout: bool) -> list[np.ndarray]:
    """The bytes of the standard library's files that are long enough, a tenth of them held out."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        name = str(path.relative_to(root))
        drawn = sha256(name.encode()).digest()[0] < 26
        if "site-packages" not in name and drawn == is_heldout and path.stat().st_size > max(LENGTHS) + 1:
            found.append(np.frombuffer(path.read_bytes(), dtype=np.uint8))
    return found


def draw_windows(texts: list[np.ndarray], count: int, length: int, random: np.random.Generator) -> Tensor:
    """``count`` windows of ``length`` bytes, int64 (N, S); texts are drawn in proportion to their length."""
    sizes = np.array([len(text) for text in texts])
    chosen = random.choice(len(texts), count, p=sizes / sizes.sum())
    starts = [random.integers(0, sizes[number] - length + 1) for number in chosen]
    rows = [texts[number][start : start + length] for number, start in zip(chosen, starts, strict=True)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def trained(config: ModelConfig, texts: list[np.ndarray], steps: int, seed: int) -> Decoder:
    """The scheme's model after ``steps`` updates; every scheme sees the same windows."""
    with torch.device("meta"):
        model = build_decoder(config)
    materialize(model, config, seed, "cpu", torch.float32)
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    rule, schedule = AdamWConfig(lr=3e-3), CosineSchedule(warmup_steps=steps // 10)
    groups = [{"params": matrices, "weight_decay": rule.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = rule.build(groups, fused=True)
    random = np.random.default_rng(1 + seed)
    for step in range(1, steps + 1):
        tokens_BS = draw_windows(texts, BATCH, SEQ_LEN + 1, random)
        loss = model(tokens_BS[:, :-1], whole_rows(tokens_BS[:, :-1]), tokens_BS[:, 1:]).loss
        (loss / (BATCH * SEQ_LEN)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rule.lr * lr_factor(schedule, step, steps)
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def evaluated(model: Decoder, config: ModelConfig, windows_NS: Tensor) -> list[float | None]:
    """The loss of the windows' last TARGETS bytes at the end of each length of LENGTHS; None beyond max_positions."""
    found: list[float | None] = []
    for length in LENGTHS:
        if config.max_positions is not None and length > config.max_positions:
            found.append(None)
            continue
        total = 0.0
        for rows_BS in windows_NS[:, -length - 1 :].split(BATCH):
            targets_BS = rows_BS[:, 1:].clone()
            targets_BS[:, :-TARGETS] = IGNORE
            total += float(model(rows_BS[:, :-1], whole_rows(rows_BS[:, :-1]), targets_BS).loss)
        found.append(round(total / (len(windows_NS) * TARGETS), 4))
    return found


def whole_rows(tokens_BS: Tensor) -> Context:
    """The context in which each row is one document."""
    return Context(torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS), torch.zeros_like(tokens_BS))


def mean(values: tuple[float | None, ...]) -> float | None:
    """The mean over the seeds, without None; None where there is no value."""
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None


def draw(losses: dict[str, list[float | None]], path: Path) -> None:
    """Plots loss over length to ``path``, a line for each scheme."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.subplots()
    for name, values in losses.items():
        known = [(length, value) for length, value in zip(LENGTHS, values, strict=True) if value is not None]
        axes.plot(*zip(*known, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set_xlabel(f"bytes seen (trained: {SEQ_LEN})")
    axes.set_ylabel(f"loss of the last {TARGETS} bytes")
    axes.grid(color=GRID, linewidth=0.8)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
