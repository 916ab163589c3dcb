"""Which of the ranks' endings a launcher names as the cause, and what it gives them: arguments and a port."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from command_runs import ENVIRONMENT
from parallel.processes import start
from parallel.processes.start import RankError, claimed_port, run_ranks

LATE_SECONDS = 1.0  # far longer than an exit takes to arrive


def one_leaves(then: str, leaving: Path) -> None:
    """Rank 1 leaves at once with code 2; rank 0, later, fails, tells that a rank is gone, or ends well.

    It waits for rank 1's file, since on a busy machine a rank may start a second after the other.
    """
    import os

    from parallel.processes.start import tell_launcher

    if os.environ["RANK"] == "1":
        leaving.touch()
        raise SystemExit(2)
    while not leaving.exists():
        time.sleep(0.01)
    time.sleep(LATE_SECONDS)
    if then == "fails":
        raise ValueError("the reason")
    if then == "tells":
        tell_launcher("rank 1 is gone", 1)
        os._exit(1)


@pytest.mark.parametrize(
    ("then", "message", "code"),
    [
        ("fails", "rank 0 of 2 failed:(?s:.*)ValueError: the reason", 1),
        ("tells", "^rank 1 of 2 exited with code 2$", 2),
        ("ends", "^rank 1 of 2 exited with code 2$", 2),
    ],
)
def test_a_bare_exit_is_named_only_where_no_rank_gives_a_reason(
    then: str, message: str, code: int, tmp_path: Path
) -> None:
    """Where all ranks end together by one rank's finding, the others' exits may arrive before its reason."""
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(one_leaves, 2, then, tmp_path / "leaving", timeout_seconds=60, threads=1)
    assert caught.value.exit_code == code


def sum_all(tensors: list[Tensor]) -> float:
    return float(torch.stack(tensors).sum())


def test_any_number_of_tensors_goes_to_the_ranks() -> None:
    """multiprocessing's own way opens a file for each, and refuses more than 251 of them."""
    tensors = [torch.tensor(float(number)) for number in range(600)]
    assert run_ranks(sum_all, 2, tensors, timeout_seconds=60, threads=1) == [179700.0, 179700.0]


ASKED_TWICE = """\
import os, signal, sys, threading, time
sys.path[:0] = {path!r}
from multiprocessing.process import BaseProcess
from parallel.processes.start import run_ranks
from parallel.processes.stop import hearing

def hang(place):
    with hearing(ends_at_second=False):
        os.mkdir(os.path.join(place, os.environ["RANK"]))
        time.sleep(600)

def ask(place):
    while len(os.listdir(place)) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGHUP)

def join(process, timeout=None):
    if sys._getframe(1).f_code.co_name == "_end" and not asked:
        asked.append(signum)
        signal.raise_signal(signum)
    return wait(process, timeout)

def raise_exit(signum, _):
    raise SystemExit(128 + signum)

if __name__ == "__main__":
    place, signum, asked = sys.argv[1], int(sys.argv[2]), []
    BaseProcess.join, wait = join, BaseProcess.join
    signal.signal(signal.SIGHUP, raise_exit)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which work in the background has not
    threading.Thread(target=ask, args=(place,), daemon=True).start()
    run_ranks(hang, 2, place, threads=1, passes_stop=True)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_second_interrupt_while_ranks_are_ended_leaves_none(tmp_path, signum) -> None:
    """As when Ctrl-C is pressed twice. The ranks take multiprocessing's SIGTERM for a request to stop, and hang."""
    (tmp_path / "work.py").write_text(ASKED_TWICE.format(path=sys.path))
    (place := tmp_path / "ranks").mkdir()
    command = [sys.executable, str(tmp_path / "work.py"), str(place), str(int(signum))]
    done = subprocess.run(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == (-signal.SIGINT if signum == signal.SIGINT else 128 + signum), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="no such names of the kernel's outside Linux")
def test_two_launchers_that_draw_the_same_port_have_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither listens yet: once in a test run, one of them found its port taken."""

    class Drawn:
        def __init__(self) -> None:
            self.ports = iter(range(20001, 20501))  # others may listen on some

        def randrange(self, *_: int) -> int:
            return next(self.ports)

    monkeypatch.setattr(random, "SystemRandom", Drawn)
    with claimed_port() as first:
        with claimed_port() as second:
            assert first < second
        monkeypatch.setattr(start, "_claim", lambda port: pytest.MonkeyPatch.context())
        with claimed_port() as planted:
            assert planted == first
    monkeypatch.undo()
    with claimed_port() as free:
        assert free >= start.FIRST_PORT
