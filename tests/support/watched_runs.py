"""Runs logged to W&B through the real package: made-up rows of a training loop, and their exact comparison.

Nothing here needs the network: offline runs are read back from their files, and the online path talks to a small server
on this machine that answers as W&B's does, or to a closed port.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.config.tree import MetricsConfig, RunConfig, TrainConfig, WandbConfig
from launcher.watch.moe import load_metrics
from launcher.watch.watchers import open_watchers

FAKE_KEY = "0123456789" * 4
CLOSED_PORT = "http://127.0.0.1:9"


def hide_account(patch: pytest.MonkeyPatch, home: Path) -> None:
    """Hides the W&B key, settings and home directory of the user who runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        patch.delenv(name)
    patch.setenv("HOME", str(home))
    patch.setenv("NETRC", str(home / "netrc"))
    patch.setenv("WANDB_ERROR_REPORTING", "false")


def rows(first: int, last: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(method of Watchers, row) as a training loop would call them, with numbers that have no short decimal form."""
    for step in range(first, last + 1):
        row: dict[str, Any] = {"step": step, "tokens": 2**40 + step, "loss": 9 / step, "lr": 1e-3 / 3, "grad_norm": 0.1}
        row |= {"tokens_per_second": 1e5 / 7, "mfu": None, "peak_gib": 1 / 3, "step_seconds": 1e-7 * step}
        counts = {layer: [step, 7, 3 * layer, 11] for layer in (1, 2)}
        row |= {"moe/layer_01/entropy": 0.5, "moe/layer_02/entropy": 1 / 7, "moe/balance_loss": 1.1, "moe/z_loss": 0.3}
        yield "update", row | load_metrics(counts, n_tokens=15, top_k=2)
        if step % 5 == 0:
            yield "eval", {"step": step, "eval_loss": 9.5 / step}
            yield "event", {"step": step, "event": "checkpoint", "path": f"checkpoints/step-{step:08d}"}
    yield "event", {"step": last, "event": "norm", "value": math.inf, "values": [math.nan, 0.5]}


def config(mode: Any) -> RunConfig:
    return RunConfig(name="watched", train=TrainConfig(steps=20), metrics=MetricsConfig(wandb=WandbConfig(mode=mode)))


def train(run_dir: Path, mode: Any, first: int, last: int) -> None:
    with open_watchers(config(mode), {"seed": 0, "train": {"steps": last}}, run_dir, first - 1, 0) as watchers:
        for method, row in rows(first, last):
            getattr(watchers, method)(row)


def exact(value: Any) -> str:
    """The value as text that differs for any two different doubles, and is equal for NaNs.

    W&B writes 9.0 as 9, and sends NaN and infinities as text; these count as equal.
    """
    if isinstance(value, list):
        return str([exact(item) for item in value])
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))
    text = value if isinstance(value, str) else repr(value)
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(text, text)


def assert_same(logged: list[dict[str, Any]], written: list[dict[str, Any]]) -> None:
    """Asserts that the rows are equal, key by key and number by number."""
    assert [{key: exact(row[key]) for key in sorted(row)} for row in logged] == [
        {key: exact(row[key]) for key in sorted(row)} for row in written
    ]
