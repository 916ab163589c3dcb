"""The fan-out: every watcher is given the same plain numbers, and all are closed whichever fails."""

from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from launcher.config.tree import MetricsConfig, RunConfig, TrainConfig, WandbConfig
from launcher.watch.metrics import MetricsFile, read_metrics
from launcher.watch.terminal import View
from launcher.watch.watchers import NullWatchers, Watchers, open_watchers


class Recorder(View):
    """A view and a W&B run that keep what they are given."""

    def __init__(self, fails: bool = False) -> None:
        self.rows: list[Any] = []
        self.closed: list[int] = []
        self.fails = fails

    def update(self, row: Any) -> None:
        self.rows.append(row)

    log = update

    def rewind(self, step: int) -> None:
        self.rows.append(f"back to {step}")

    def event(self, text: str) -> None:
        self.rows.append(text)

    def close(self) -> None:
        self.closed.append(-1)
        if self.fails:
            raise RuntimeError("view")

    def finish(self, exit_code: int = 0) -> None:
        self.closed.append(exit_code)


def disabled(name: str = "run") -> RunConfig:
    return RunConfig(name=name, train=TrainConfig(steps=3), metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")))


def open_files(folder: Path) -> tuple[MetricsFile, MetricsFile]:
    return MetricsFile(folder / "metrics.jsonl"), MetricsFile(folder / "ledger.jsonl")


def test_everyone_is_given_the_same_plain_row(tmp_path: Path) -> None:
    view, run = Recorder(), Recorder()
    with Watchers(*open_files(tmp_path), view, run) as watchers:  # type: ignore[arg-type]
        watchers.consumed({"step": 1, "first_sample": 0})
        watchers.update({"step": 1, "loss": torch.tensor(0.5), "moe/layer_00/load": torch.tensor([0.25, 0.75])})
        watchers.eval({"step": 1, "eval_loss": 0.25})
        watchers.event({"step": 1, "event": "checkpoint"})
        watchers.sync()
    expected = [
        {"step": 1, "loss": 0.5, "moe/layer_00/load": [0.25, 0.75]},
        {"step": 1, "eval_loss": 0.25},
        {"step": 1, "event": "checkpoint"},
    ]
    assert read_metrics(tmp_path / "metrics.jsonl") == view.rows == run.rows == expected
    assert read_metrics(tmp_path / "ledger.jsonl") == [{"step": 1, "first_sample": 0}]
    assert run.closed == [0]


def test_a_row_of_the_wrong_kind_is_our_own_mistake(tmp_path: Path) -> None:
    watchers = Watchers(*open_files(tmp_path), Recorder(), Recorder())  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        watchers.eval({"step": 1, "eval_loss": 1.0, "loss": 1.0})
    watchers.close()


def test_planted_failure_of_the_view_leaves_nothing_open(tmp_path: Path) -> None:
    files, run = open_files(tmp_path), Recorder()
    with pytest.raises(RuntimeError, match="view"), Watchers(*files, Recorder(fails=True), run):  # type: ignore[arg-type]
        raise KeyboardInterrupt
    assert run.closed == [1]
    assert not [each.path for each in psutil.Process().open_files() if Path(each.path).is_relative_to(tmp_path)]
    for file in files:
        file.write({"step": 1})  # which comes too late
    assert [path.read_bytes() for path in tmp_path.glob("*.jsonl")] == [b"", b""]


def test_rank_0_speaks_and_the_others_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        run_dir = tmp_path / str(rank)
        run_dir.mkdir()
        with open_watchers(disabled(), {}, run_dir, 0, rank) as watchers:
            watchers.update({"step": 1, "loss": 2.0})
            watchers.eval({"step": 1, "eval_loss": 2.5})
            watchers.event({"step": 1, "event": "checkpoint"})
            watchers.sync()
        assert isinstance(watchers, NullWatchers) == (rank == 1)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    assert written == ["0/ledger.jsonl", "0/metrics.jsonl"]
    assert not (tmp_path / "0" / "wandb").exists()
    assert "step 1/3  loss 2.0000" in capsys.readouterr().out


def test_reopening_at_a_restored_step_drops_later_rows(tmp_path: Path) -> None:
    for restored_step in (0, 1):
        with open_watchers(disabled(), {}, tmp_path, restored_step, 0) as watchers:
            for step in range(restored_step + 1, 4):
                watchers.update({"step": step, "loss": float(restored_step)})
                watchers.consumed({"step": step, "loss": float(restored_step)})
    for name in ("metrics.jsonl", "ledger.jsonl"):
        rows = [(row["step"], row["loss"]) for row in read_metrics(tmp_path / name)]
        assert rows == [(1, 0.0), (2, 1.0), (3, 1.0)]
