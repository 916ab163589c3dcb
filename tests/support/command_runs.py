"""Helpers to run the real command on small configs: write the config, start, wait for a step, read the rows."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from launcher.config.dump import dump_config
from launcher.config.tree import CheckpointConfig, MetricsConfig, RunConfig, WandbConfig
from launcher.training.start import start_training
from launcher.watch.metrics import read_metrics
from launcher.watch.wandb_read import read_history, wandb_files
from layout_runs import MOE_MODEL, run_config
from modeling.moe_config import BiasBalance
from modeling.optimizers.config import AdamWConfig

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
BIAS_MODEL = dataclasses.replace(MOE_MODEL, moe=dataclasses.replace(MOE_MODEL.moe, balance=BiasBalance(rate=0.01)))


def write_config(folder: Path, tokens: str, name: str, **changes) -> Path:
    """A config file for a run in ``folder``/``name``."""
    defaults = {"model": BIAS_MODEL, "optimizer": AdamWConfig(lr=1e-3), "steps": 6}
    config: RunConfig = dataclasses.replace(
        run_config(tokens, **{**defaults, **changes}),
        name=name,
        run_dir=str(folder / name),
        checkpoint=CheckpointConfig(every_steps=2),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(config))
    return path


def command(config: Path, ranks: int, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "launcher", "train", str(config), "--ranks", str(ranks), *overrides]


def train(config: Path, ranks: int, *overrides: str) -> list[dict]:
    """Trains as `roundtable train` does, to the end; returns the rows of updates."""
    assert start_training(config, overrides, ranks) == 0
    return updates(config)


def updates(config: Path) -> list[dict]:
    rows = read_metrics(config.with_suffix("") / "metrics.jsonl")
    return [row for row in rows if "loss" in row]


def ledger(config: Path) -> list[dict]:
    return read_metrics(config.with_suffix("") / "ledger.jsonl")


def same_events_in_wandb(run_dir: Path) -> set[str]:
    """Asserts that W&B's file of a run has the same events as metrics.jsonl; returns their names.

    The run must have been started once.
    """
    (path,) = wandb_files(run_dir)
    rows = read_metrics(run_dir / "metrics.jsonl")
    logged, written = ([row for row in each if "event" in row] for each in (read_history(path), rows))
    assert list(map(with_nan_as_text, logged)) == list(map(with_nan_as_text, written))
    return {row["event"] for row in written}


def with_nan_as_text(row: dict) -> dict:
    """The row with NaN and infinities as strings, so that two rows with a NaN can be equal."""
    return json.loads(json.dumps(row), parse_constant=str)


def numbers(rows: list[dict]) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"], row["tokens"]) for row in rows]


def wait_for_step(config: Path, step: int, process: subprocess.Popen) -> None:
    path = config.with_suffix("") / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and any(row["step"] >= step for row in read_metrics(path))):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read() if process.stderr else ""
        time.sleep(0.01)


def rank_pids(launcher_pid: int) -> list[int]:
    """The processes that the launcher's fork server has started; empty while there is none."""
    return [rank for child in children(launcher_pid) for rank in children(child)]


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []
