"""A launcher, a fork server, an agent or a step daemon that is killed leaves no process behind, and the run goes on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from command_runs import ENVIRONMENT, command, ledger, numbers, updates, wait_for_step, write_config
from launcher.training.start import start_training
from layout_runs import write_tokens
from orphans import kill_and_see_all_end, tree_of
from parallel.config import ParallelConfig

STEPS = 400  # far more than are reached before the kill
LAST_STEP = 12


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, tokens):
    config = write_config(tmp_path_factory.mktemp("whole"), tokens, "whole")
    assert start_training(config, [f"train.steps={LAST_STEP}"], 2) == 0
    return numbers(updates(config)), ledger(config)


def popen(arguments: list[str], **environment: str) -> subprocess.Popen:
    """A command, as a shell would start it."""
    return subprocess.Popen(
        arguments,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )


def launcher(process: subprocess.Popen) -> int:
    return process.pid


def fork_server(process: subprocess.Popen) -> int:
    """The child that has the ranks."""
    return max(psutil.Process(process.pid).children(), key=lambda child: len(child.children())).pid


def listening(tree: list[psutil.Process]) -> set[str]:
    """The addresses at which they can be reached over the network."""
    found = [each for process in tree for each in process.net_connections("inet")]
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


def goes_on(config: Path, uninterrupted) -> None:
    """A second start comes in at once, and to the same end."""
    assert start_training(config, [f"train.steps={LAST_STEP}", "checkpoint.every_steps=2"], 2) == 0
    expected, expected_ledger = uninterrupted
    assert numbers(updates(config))[:LAST_STEP] == expected
    assert ledger(config)[:LAST_STEP] == expected_ledger


@pytest.mark.parametrize(
    ("whom", "signum"),
    [
        (launcher, signal.SIGKILL),
        pytest.param(launcher, signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(launcher, signal.SIGSEGV, marks=pytest.mark.slow),
        pytest.param(fork_server, signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_killed_in_the_midst_of_training(tmp_path, tokens, uninterrupted, whom, signum):
    """With a rank that is stopped, W&B's service, and a reader of the output that waits for its end."""
    config = write_config(tmp_path, tokens, "run", steps=STEPS)
    process = popen([*command(config, 2, "metrics.wandb.mode=offline")])
    wait_for_step(config, 5, process)
    tree = tree_of(process.pid)
    assert len(tree) >= 6, tree  # launcher, tracker, fork server, two ranks, W&B's service
    assert listening(tree) <= {"127.0.0.1", "::1"}
    psutil.Process(fork_server(process)).children()[1].suspend()
    victim = psutil.Process(whom(process))
    kill_and_see_all_end(victim.pid, tree if whom is launcher else [victim, *victim.children(recursive=True)], signum)
    errors = process.communicate(timeout=60)[1]  # whoever reads its output sees the end of it
    if whom is fork_server:  # of which the launcher tells
        assert process.returncode == 1
        assert "the fork server that started it was killed" in errors
        assert "Traceback" not in errors
    goes_on(config, uninterrupted)


@pytest.mark.slow
def test_killed_while_the_fork_server_imports(tmp_path, tokens):
    """It takes seconds until there are ranks."""
    config = write_config(tmp_path, tokens, "run", steps=STEPS)
    process = popen(command(config, 2))
    deadline = time.monotonic() + 120
    while len(tree_of(process.pid)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    kill_and_see_all_end(process.pid, tree_of(process.pid))
    process.communicate(timeout=10)


@pytest.mark.slow
def test_killed_fork_server_is_replaced(tmp_path, tokens, uninterrupted):
    """--max-restarts covers it."""
    config = write_config(tmp_path, tokens, "run", steps=LAST_STEP)
    process = popen([*command(config, 2), "--max-restarts", "1"])
    wait_for_step(config, 3, process)
    os.kill(fork_server(process), signal.SIGKILL)
    assert process.communicate(timeout=200)[1].splitlines()[1].startswith("restart 1 of 1, from step ")
    assert process.returncode == 0
    assert (numbers(updates(config)), ledger(config)) == uninterrupted


@pytest.mark.slow
def test_killed_agent_of_torchrun(tmp_path, tokens, uninterrupted):
    config = write_config(tmp_path, tokens, "run", steps=STEPS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "launcher"]
    process = popen([*torchrun, "train", str(config)])
    wait_for_step(config, 5, process)
    kill_and_see_all_end(process.pid, tree_of(process.pid))
    process.communicate(timeout=10)
    goes_on(config, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 6])  # while it imports, and while it traces, which takes half a minute
def test_killed_plan(seconds):
    """The process that traces the step ends with the command."""
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    process = popen([sys.executable, "-m", "launcher", "plan", str(quickstart), "--as", "cpu", "train.precision=fp32"])
    deadline = time.monotonic() + 120
    while len(tree_of(process.pid)) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(seconds)
    kill_and_see_all_end(process.pid, tree_of(process.pid))
    process.communicate(timeout=10)


WORKERS = """\
import sys, time
from data.workers import run_in_processes
if __name__ == "__main__":
    run_in_processes(time.sleep, [(300,), (300,)], 2, print)
"""


def test_killed_preparation(tmp_path):
    """Its workers end with it, one that is stopped too."""
    (tmp_path / "work.py").write_text(WORKERS)
    process = popen([sys.executable, str(tmp_path / "work.py")], PYTHONPATH=str(Path(__file__).parents[2]))
    deadline = time.monotonic() + 60
    while sum(child.num_threads() > 1 for child in psutil.Process(process.pid).children()) < 2:  # which they end by
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    tree = tree_of(process.pid)
    tree[-1].suspend()
    kill_and_see_all_end(process.pid, tree)
    process.communicate(timeout=10)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["prove", "preflight"])
def test_killed_command_that_has_ranks(tmp_path, tokens, command):
    config = write_config(tmp_path, tokens, "run", parallel=ParallelConfig(pp=2))
    process = popen([sys.executable, "-m", "launcher", command, str(config), "--ranks", "2"])
    deadline = time.monotonic() + 120
    while len(tree_of(process.pid)) < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    kill_and_see_all_end(process.pid, tree_of(process.pid))
    process.communicate(timeout=10)


def test_a_fork_server_that_cannot_import_is_not_called_killed(tmp_path):
    """A library that is half installed, or cannot make its cache."""
    (tmp_path / "broken_library.py").write_text('raise ValueError("half installed")\n')
    code = "from parallel.processes.start import run_ranks; run_ranks(len, 1, (), preload=['broken_library'])"
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "ValueError: half installed" in done.stderr
    assert done.stderr.splitlines()[-1].endswith(
        "no rank could be started: the fork server ended; the reason is above, "
        "or it was killed, most likely for want of memory"
    )
