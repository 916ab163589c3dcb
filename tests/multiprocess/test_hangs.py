"""Ranks that die, hang or fail, under every axis: the others end, the rank is named with its place, nobody stays.

Times are bounded by the tests' timeout only; the machines that run them may be slow.
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.flight_recorder.components.loader import read_dump

import hang_job
import launcher.training.start as start
from hang_runs import Ended, living_ranks, run_alone, run_with_launcher, small_run
from launcher.cli import main
from launcher.config.tree import RunConfig
from launcher.guard.watchdog import Watchdog
from launcher.watch.metrics import read_metrics
from layout_runs import DENSE_MODEL, write_tokens
from parallel.config import ParallelConfig
from parallel.mesh import lone_mesh

LAYOUTS = {
    "dp": ({}, "rank 3 (dp 3)"),
    "tp": ({"tp": 2}, "rank 3 (dp 1, tp 1)"),
    "pp": ({"pp": 2}, "rank 3 (pp 1, dp 1)"),
    "cp": ({"cp": 2}, "rank 3 (dp 1, cp 1)"),
    "ep": ({"ep": 4}, "rank 3 (dp 3, ep 3)"),
}
STEP_TIMEOUT = 12  # of a step that takes a second on an idle machine
ENDED = (
    "ended without a message (killed, ended by NCCL after a communication error, or its node is down; see its output)"
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def layout_run(folder: Path, tokens: str, axis: str, **changes):
    layout, place = LAYOUTS[axis]
    parallel = ParallelConfig(**layout)
    return small_run(folder, tokens, parallel=parallel, micro_batch_size=1, **changes), place


def log_of(config, rank: int) -> str:
    path = config.run_path / "logs" / f"rank-{rank}.txt"
    return path.read_text() if path.exists() else ""


def end_event(config) -> dict:
    (row,) = [row for row in read_metrics(config.run_path / "metrics.jsonl") if row.get("event") == "ranks_ended"]
    return row


@pytest.mark.parametrize(
    "axis", [pytest.param(axis, marks=[] if axis in ("pp", "ep") else pytest.mark.slow) for axis in LAYOUTS]
)
def test_killed_rank_is_named_and_nobody_stays(tmp_path, tokens, axis):
    config, place = layout_run(tmp_path, tokens, axis)
    error = run_with_launcher(config, 4, "killed", 3)
    assert str(error) == f"{place} of 4 ended by signal SIGKILL"
    assert error.exit_code == 1
    assert living_ranks() == []


@pytest.mark.parametrize(
    "axis", ["dp", *(pytest.param(axis, marks=pytest.mark.slow) for axis in LAYOUTS if axis != "dp")]
)
def test_failed_rank_is_named_with_its_traceback(tmp_path, tokens, axis):
    config, place = layout_run(tmp_path, tokens, axis)
    error = run_with_launcher(config, 4, "raises", 3)
    assert str(error).startswith(f"{place} of 4 failed:\nTraceback")
    assert "ValueError: a planted fault" in str(error)
    assert error.exit_code == 1
    assert living_ranks() == []
    assert "ValueError: a planted fault" in log_of(config, 3)


@pytest.mark.parametrize(
    "axis", ["pp", *(pytest.param(axis, marks=pytest.mark.slow) for axis in LAYOUTS if axis != "pp")]
)
def test_stopped_rank_is_missing_and_the_others_say_what_they_wait_for(tmp_path, tokens, axis):
    config, place = layout_run(tmp_path, tokens, axis, step_timeout_seconds=STEP_TIMEOUT)
    error = run_with_launcher(config, 4, "stopped", 3)
    assert f"missing: {place}, last heard of" in str(error)
    assert "(train.step_timeout_seconds)" in str(error)
    assert error.exit_code == 1
    assert living_ranks() == []
    event = end_event(config)
    assert (event["kind"], event["rank"], event["place"], event["step"]) == ("hang", 3, place, 3)
    for rank in range(3):
        log = log_of(config, rank)
        assert "thread MainThread:" in log and "in train_watched" in log
    waiting = [rank for rank in range(3) if " waits in step 3 in " in str(error) and " over " in log_of(config, rank)]
    assert waiting, str(error)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["sleeps recorded", "other collective"])
def test_late_rank_is_named_with_the_line_it_is_at(tmp_path, tokens, fault):
    config, place = layout_run(tmp_path, tokens, "tp", step_timeout_seconds=STEP_TIMEOUT)
    error = run_with_launcher(config, 4, fault, 3)
    word = {"sleeps recorded": "slowest", "other collective": "out of step with the others"}[fault]
    assert f"{word}: {place} " in str(error)
    assert end_event(config)["rank"] == 3
    records = sorted(path.name for path in (config.run_path / "logs").glob("flight-rank-*"))
    if fault == "sleeps recorded":
        assert f"{place} is at work in step 3" in str(error)
        assert "in strike" in log_of(config, 3)
        assert records == [f"flight-rank-{rank}" for rank in range(4)]
        logs = config.run_path / "logs"
        assert all(read_dump("flight-rank-", str(logs / name))["entries"] for name in records)
    else:
        assert records == []
    assert living_ranks() == []


@pytest.mark.slow
def test_rank_whose_disk_hangs_is_named_with_the_line_that_waits(tmp_path, tokens):
    """The disk hangs in step 3, when the samples of some steps more have been read ahead."""
    config, _ = layout_run(tmp_path, tokens, "dp", step_timeout_seconds=STEP_TIMEOUT)
    error = run_with_launcher(config, 2, "disk hangs", 1)
    assert "slowest: rank 1 (dp 1) is at work in step " in str(error)
    assert "in _wait_for_samples" in str(error)
    assert end_event(config)["step"] > 3
    assert "thread read ahead:" in log_of(config, 1)
    assert living_ranks() == []


@pytest.mark.slow
def test_rank_that_keeps_pythons_lock_is_missing(tmp_path, tokens):
    config, place = layout_run(tmp_path, tokens, "tp", step_timeout_seconds=STEP_TIMEOUT)
    error = run_with_launcher(config, 4, "holds the lock", 3)
    assert f"missing: {place}, last heard of" in str(error)
    assert living_ranks() == []


@pytest.mark.slow
def test_stopped_first_rank_is_named_by_the_second(tmp_path, tokens):
    config, _ = layout_run(tmp_path, tokens, "dp", step_timeout_seconds=STEP_TIMEOUT)
    error = run_with_launcher(config, 2, "stopped", 0)
    assert "rank 0 (dp 0) has not been heard of for" in str(error)
    assert living_ranks() == []
    assert "thread MainThread:" in log_of(config, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_log_on_a_full_disk_keeps_no_watchdog_from_its_end(tmp_path):
    """It named no culprit: each rank's watchdog ended with a traceback of its own."""
    watchdog = Watchdog(RunConfig(run_dir=str(tmp_path)), lone_mesh(torch.device("cpu")))
    watchdog.log = open("/dev/full", "a")  # noqa: SIM115  (the watchdog closes it)
    watchdog.write("the stacks of all threads")
    watchdog.close_log()
    assert watchdog.log.closed


@pytest.mark.slow
def test_straggler_is_named_with_its_place(tmp_path, tokens):
    """The rank sleeps in each step; nobody else is named, though all take as long by the wall."""
    small_run(tmp_path, tokens, model=DENSE_MODEL, steps=30)
    assert main_with(tmp_path, "slow", 1) == 0
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row.get("event") == "straggler"]
    (row,) = rows
    assert (row["rank"], row["place"]) == (1, "rank 1 (dp 1)")
    assert row["ratio"] >= 1.5 and row["own_seconds"] >= 1.5


@pytest.mark.slow
def test_long_phases_do_not_trip_the_watchdog(tmp_path, tokens):
    """The start, the first step and checkpoints each take longer here than a step may."""
    small_run(tmp_path, tokens, model=DENSE_MODEL, step_timeout_seconds=STEP_TIMEOUT, every_steps=1, steps=2)
    assert main_with(tmp_path, f"long phases {STEP_TIMEOUT + 3}", 1) == 0
    assert not list((tmp_path / "run" / "logs").iterdir())


def main_with(folder: Path, fault: str, rank: int) -> int:
    """`train --ranks 2` with a fault in one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "train_rank", partial(hang_job.train_rank, fault, rank, 1))
        return main(["train", str(folder / "run.yaml"), "--ranks", "2"])


# Without a launcher of ours: each rank finds out by itself.


def spoken(ended: list[Ended]) -> list[str]:
    return [line for each in ended for line in each.stderr.splitlines() if line.startswith("rank ")]


@pytest.mark.parametrize(
    "axis", ["pp", *(pytest.param(axis, marks=pytest.mark.slow) for axis in LAYOUTS if axis != "pp")]
)
def test_killed_rank_without_a_launcher(tmp_path, tokens, axis):
    config, place = layout_run(tmp_path, tokens, axis)
    ended = run_alone(config, 4, "killed", 3)
    assert [each.code for each in ended] == [1, 1, 1, -9]
    assert spoken(ended) == [f"{place} {ENDED}"]
    assert end_event(config)["place"] == place


def test_killed_first_rank_without_a_launcher(tmp_path, tokens):
    config, _ = layout_run(tmp_path, tokens, "dp")
    ended = run_alone(config, 2, "killed", 0)
    assert [each.code for each in ended] == [-9, 1]
    assert spoken(ended) == [f"rank 0 (dp 0) {ENDED}"]


@pytest.mark.parametrize("rank", [0, 1])
def test_failed_rank_without_a_launcher(tmp_path, tokens, rank):
    config, _ = layout_run(tmp_path, tokens, "dp")
    ended = run_alone(config, 2, "raises", rank)
    assert [each.code for each in ended] == [1, 1]
    assert spoken(ended) == [f"rank {rank} (dp {rank}) failed: ValueError: a planted fault"]
    assert "ValueError: a planted fault" in ended[rank].stderr.splitlines()
    assert "Traceback" not in ended[1 - rank].stderr
    assert end_event(config)["rank"] == rank


def test_user_mistake_in_one_rank_is_exit_code_two(tmp_path, tokens):
    config, _ = layout_run(tmp_path, tokens, "dp")
    ended = run_alone(config, 2, "user error", 1)
    assert [each.code for each in ended] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_rank_without_a_launcher(tmp_path, tokens, rank):
    """The stopped one ends too, once it is let go on."""
    config, _ = layout_run(tmp_path, tokens, "dp", step_timeout_seconds=STEP_TIMEOUT)
    ended = run_alone(config, 2, "stopped", rank)
    assert [each.code for each in ended] == [1, 1]
    assert f"rank {rank} (dp {rank})" in ended[1 - rank].stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "stopped", "raises"])
def test_torchrun_job_ends(tmp_path, tokens, fault):
    _, place = layout_run(tmp_path, tokens, "pp", step_timeout_seconds=STEP_TIMEOUT)
    job = Path(__file__).parents[1] / "support" / "hang_job.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(job)]
    arguments = [fault, "3", "3", "train", str(tmp_path / "run.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 1, ended.stderr
    if fault == "stopped":
        assert f"missing: {place}, last heard of" in ended.stderr
    if fault == "raises":
        assert "ValueError: a planted fault" in ended.stderr
