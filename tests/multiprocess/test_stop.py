"""Requests to stop, by real signals to the real command: it saves, exits 75, and goes on later as if nothing had been.

Equality is bit for bit (one layout, fp32, CPU).
"""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from command_runs import (
    ENVIRONMENT,
    command,
    ledger,
    numbers,
    rank_pids,
    same_events_in_wandb,
    updates,
    wait_for_step,
    write_config,
)
from launcher.training.start import start_training
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens
from parallel.config import ParallelConfig
from parallel.processes.stop import KILLED, REPEAT_SECONDS, STOPPED

pytestmark = pytest.mark.xdist_group("stop")  # what its tests share takes long to make

STEPS = 400  # far more than are reached before the signal
LAST_STEP = 12  # of the runs that are compared
PP = ParallelConfig(pp=2)
HEARING = """\
import faulthandler, sys
sys.path[:0] = {path!r}
from parallel.processes.stop import hearing
with hearing(ends_at_second=True) as request:
    faulthandler.dump_traceback_later(3, exit=True)  # as the watchdog does
    print("trains", flush=True)
    assert sys.stdin.readline() == "go on\\n"
print(request.signal, flush=True)
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def start(config: Path, ranks: int, *overrides: str) -> subprocess.Popen:
    """The command in a process group of its own, as a shell would start it."""
    return subprocess.Popen(
        command(config, ranks, *overrides),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def end(process: subprocess.Popen) -> tuple[int, str]:
    """The exit code, and what it wrote to stderr; returns when its last process has ended."""
    try:
        _, errors = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # else its ranks would keep the cores busy under later tests
        raise
    return process.returncode, errors


def events(config: Path, name: str) -> list[dict]:
    return [row for row in read_metrics(config.with_suffix("") / "metrics.jsonl") if row.get("event") == name]


def to_launcher(process: subprocess.Popen, signum: int) -> None:
    process.send_signal(signum)


def to_one_rank(process: subprocess.Popen, signum: int) -> None:
    os.kill(rank_pids(process.pid)[-1], signum)


def to_group(process: subprocess.Popen, signum: int) -> None:
    os.killpg(process.pid, signum)


WAYS = {
    "SIGTERM to the launcher, pp2": (to_launcher, signal.SIGTERM, PP),
    "SIGUSR1 to one rank, pp2": (to_one_rank, signal.SIGUSR1, PP),
    "SIGTERM to the group, dp2": (to_group, signal.SIGTERM, None),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tokens) -> Callable[[ParallelConfig | None], tuple[list, list]]:
    """The rows of a run that nobody stopped, and its ledger, for a layout; made once."""

    @functools.cache
    def of(parallel: ParallelConfig | None) -> tuple[list, list]:
        config = write_config(tmp_path_factory.mktemp("whole"), tokens, "whole", parallel=parallel)
        assert start_training(config, [f"train.steps={LAST_STEP}"], 2) == 0
        return numbers(updates(config)), ledger(config)

    return of


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if "one rank" not in way else way for way in WAYS]
)
def test_stopped_run_saves_and_goes_on_bit_identical(tmp_path, tokens, uninterrupted, way):
    send, signum, parallel = WAYS[way]
    config = write_config(tmp_path, tokens, "stopped", parallel=parallel, steps=STEPS)
    process = start(config, 2, "checkpoint.every_steps=null", "metrics.wandb.mode=offline")
    wait_for_step(config, 2, process)
    send(process, signum)
    assert end(process) == (STOPPED, "")
    (stopped,) = events(config, "stopped")
    assert same_events_in_wandb(config.with_suffix("")) >= {"start", "checkpoint", "stopped"}
    rows = updates(config)
    assert stopped["signal"] == signal.Signals(signum).name
    assert stopped["step"] == rows[-1]["step"] == len(rows) < STEPS
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == [f"step-{len(rows):08d}"]
    last = max(LAST_STEP, len(rows) + 2)
    assert start_training(config, [f"train.steps={last}", "checkpoint.every_steps=null"], 2) == 0
    expected, expected_ledger = uninterrupted(parallel)
    assert numbers(updates(config))[:LAST_STEP] == expected
    assert ledger(config)[:LAST_STEP] == expected_ledger
    assert [row["step"] for row in updates(config)] == list(range(1, last + 1))


EARLY = """
import signal, sys
from launcher.cli import main
from launcher.training import start
start.prepare_missing = lambda config: signal.raise_signal(int(sys.argv[2]))
sys.exit(main(["train", sys.argv[1], "--ranks", "2"]))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_before_the_ranks_are_started_changes_nothing(tmp_path, tokens, signum):
    """As while data is prepared; the launcher ended by the signal."""
    config = write_config(tmp_path, tokens, "early", steps=STEPS)
    arguments = [sys.executable, "-P", "-c", EARLY, str(config), str(int(signum))]
    ended = subprocess.run(arguments, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (STOPPED, "", "")
    assert not config.with_suffix("").exists()


@pytest.mark.slow
def test_a_request_before_the_first_step_trains_nothing(tmp_path, tokens):
    config = write_config(tmp_path, tokens, "early", steps=STEPS)
    process = start(config, 2)
    deadline = time.monotonic() + 120
    while len(rank_pids(process.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    to_group(process, signal.SIGTERM)
    assert end(process) == (STOPPED, "")
    assert updates(config) == []
    assert [row["step"] for row in events(config, "stopped")] == [0]


@pytest.mark.slow
def test_a_second_request_ends_at_once(tmp_path, tokens):
    config = write_config(tmp_path, tokens, "twice", global_batch_size=1 << 17)  # one step takes many minutes
    process = start(config, 2)
    deadline = time.monotonic() + 120
    while not (tmp_path / "twice" / "ledger.jsonl").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    ranks = rank_pids(process.pid)
    time.sleep(5)  # the ledger is there shortly before the first step: a request in between would end the run with 75
    to_launcher(process, signal.SIGTERM)
    time.sleep(REPEAT_SECONDS + 2)  # it counts from when the first is heard, which on a busy machine takes a while
    assert process.poll() is None
    to_launcher(process, signal.SIGTERM)
    assert end(process) == (KILLED + signal.SIGTERM, "")
    assert len(ranks) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert not list((tmp_path / "twice" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_rank_of_a_job_hears_for_itself(tmp_path, tokens):
    """As under srun or torchrun: no launching process, the signal comes to the rank, and twice at that."""
    config = write_config(tmp_path, tokens, "job", steps=STEPS)
    job = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29671"}
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher", "train", str(config)],
        env={**ENVIRONMENT, **job},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(config, 2, process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    code, _ = end(process)
    assert code == STOPPED
    assert events(config, "stopped")


def test_a_rank_that_was_stopped_past_the_watchdogs_timer_goes_on():
    rank = subprocess.Popen(
        [sys.executable, "-c", HEARING.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert rank.stdout is not None and rank.stdout.readline() == "trains\n"
    rank.send_signal(signal.SIGTSTP)
    deadline = time.monotonic() + 30
    while psutil.Process(rank.pid).status() != psutil.STATUS_STOPPED:
        assert rank.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(3)
    rank.send_signal(signal.SIGCONT)
    output, errors = rank.communicate("go on\n", timeout=30)
    assert (rank.returncode, output, errors) == (0, "None\n", "")
