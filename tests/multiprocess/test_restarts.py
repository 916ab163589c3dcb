"""Starting again after a crash: the same losses as without one, an event that says why, and an end to crash loops."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import hang_job
import launcher.training.start as start
from data.errors import UnreadObject
from hang_runs import living_ranks, small_run
from launcher.cli import main
from launcher.config.tree import RunConfig
from launcher.guard.restarts import FRUITLESS_STARTS, Restart, Restarts, restart_by_torchrun
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens
from parallel.checkpoint.store import step_name
from parallel.config import ParallelConfig


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def rows_of(folder: Path) -> list[dict]:
    return read_metrics(folder / "run" / "metrics.jsonl")


def losses(folder: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows_of(folder) if "loss" in row]


def events(folder: Path, name: str) -> list[dict]:
    return [row for row in rows_of(folder) if row.get("event") == name]


def train(monkeypatch, folder: Path, fault: str, *options: str, rank: int = 1) -> int:
    """`train` on two ranks of this machine, one of which has the fault before step 4."""
    monkeypatch.setattr(start, "train_rank", partial(hang_job.train_rank, fault, rank, 4))
    return main(["train", str(folder / "run.yaml"), "--ranks", "2", *options])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tokens):
    folder = tmp_path_factory.mktemp("whole")
    small_run(folder, tokens, parallel=ParallelConfig(pp=2), micro_batch_size=1)
    assert main(["train", str(folder / "run.yaml"), "--ranks", "2"]) == 0
    return losses(folder)


@pytest.mark.parametrize("kind", ["killed", pytest.param("raises", marks=pytest.mark.slow)])
def test_crashed_run_goes_on_from_its_checkpoint(tmp_path, tokens, uninterrupted, monkeypatch, capsys, kind):
    small_run(tmp_path, tokens, parallel=ParallelConfig(pp=2), micro_batch_size=1, every_steps=2)
    assert train(monkeypatch, tmp_path, f"{kind} once {tmp_path / 'marker'}", "--max-restarts", "2") == 0
    assert losses(tmp_path) == uninterrupted
    (event,) = events(tmp_path, "restart")
    reason = {
        "killed": "rank 1 (pp 1) of 2 ended by signal SIGKILL",
        "raises": "rank 1 (pp 1) of 2 failed: ValueError: a planted fault",
    }[kind]
    assert event == {"step": 2, "event": "restart", "restart": 1, "max_restarts": 2, "reason": reason}
    assert "restart 1 of 2, from step 2" in capsys.readouterr().err.splitlines()
    assert living_ranks() == []


@pytest.mark.slow
def test_crash_loop_ends(tmp_path, tokens, monkeypatch, capsys):
    small_run(tmp_path, tokens, every_steps=2)
    assert train(monkeypatch, tmp_path, "killed", "--max-restarts", "10") == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1] == f"not started again: {FRUITLESS_STARTS} starts in a row ended before a checkpoint after step 2"
    assert [event["restart"] for event in events(tmp_path, "restart")] == [1, 2, 3]


@pytest.mark.slow
def test_users_mistake_is_not_tried_again(tmp_path, tokens, monkeypatch, capfd):
    small_run(tmp_path, tokens, every_steps=2)
    assert train(monkeypatch, tmp_path, "user error", "--max-restarts", "2") == 2
    assert "restart" not in capfd.readouterr().err


def test_token_files_that_were_cut_are_named_and_not_tried_again(tmp_path, monkeypatch, capfd):
    tokens = write_tokens(tmp_path, n_documents=3000)
    small_run(tmp_path, tokens, every_steps=2, steps=40)
    assert train(monkeypatch, tmp_path, "tokens cut", "--max-restarts", "2") == 2
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith("ended by signal SIGBUS")
    assert second.startswith(f"{tokens}.bin has 0 bytes where {tokens}.idx describes ")
    assert living_ranks() == []


def test_a_store_that_is_away_spoils_no_tokens(monkeypatch):
    """It may have ended the ranks, and be there again for the next start."""

    def check(config: RunConfig) -> None:
        raise UnreadObject("s3://bucket/a.bin cannot be read")

    monkeypatch.setattr(start, "check_tokens", check)
    assert start.spoilt_tokens(RunConfig()) is None


def checkpoint_at(folder: Path, step: int) -> str:
    """A folder of checkpoints that holds one more."""
    (folder / step_name(step)).mkdir()
    return str(folder)


def test_restarts_are_counted_and_progress_forgives(tmp_path):
    restarts = Restarts(str(tmp_path), 20)
    for number in range(1, 9):
        if number % 3 == 0:  # progress, just before the loop would count as fruitless
            checkpoint_at(tmp_path, number)
        assert restarts.next(1, "x", stop_asked=False) == Restart(number, 20, "x")
    few = Restarts(str(tmp_path), 1)
    assert few.next(1, "x", stop_asked=False) == Restart(1, 1, "x")
    assert few.next(1, "x", stop_asked=False) == "no restart is left (--max-restarts 1)"
    for code, stop_asked in ((2, False), (75, False), (1, True)):
        assert Restarts(str(tmp_path), 5).next(code, "x", stop_asked=stop_asked) == ""
    assert Restarts("memory://nowhere", 0).next(1, "x", stop_asked=False) == ""


def test_torchruns_count_is_read():
    assert restart_by_torchrun({"TORCHELASTIC_RESTART_COUNT": "0"}) is None
    assert restart_by_torchrun({}) is None
    found = restart_by_torchrun({"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"})
    assert found is not None and (found.number, found.allowed) == (2, 3)


def test_max_restarts_is_refused_in_a_job(tmp_path, tokens, monkeypatch, capsys):
    small_run(tmp_path, tokens)
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(tmp_path / "run.yaml"), "--max-restarts", "1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--max-restarts=1 must be 0 under srun or torchrun; ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_the_run(tmp_path, tokens, uninterrupted, rank):
    small_run(tmp_path, tokens, parallel=ParallelConfig(pp=2), micro_batch_size=1, every_steps=2)
    job = Path(__file__).parents[1] / "support" / "hang_job.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    arguments = [f"killed once {tmp_path / 'marker'}", str(rank), "4", "train", str(tmp_path / "run.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*torchrun, str(job), *arguments], env=environment, capture_output=True, text=True, timeout=290
    )
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path) == uninterrupted
    (event,) = events(tmp_path, "restart")
    assert (event["restart"], event["max_restarts"]) == (1, 1)
