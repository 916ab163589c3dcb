"""A process ends when the one that started it does, however that came to its end: killed, out of memory, crashed.

The kernel sees to it where it can: its signal needs no Python, which could not run while native code keeps Python's
lock, and it ends a stopped process too. Nobody else would: a process that nobody waits for lives on, with its GPU.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

LAUNCHER = "ROUNDTABLE_LAUNCHER"  # the variable by which a fork server knows whose it is
STEP_DAEMON = "slurmstepd"  # what starts the tasks of a Slurm step on a node
LOOK_SECONDS = 1.0
PR_SET_PDEATHSIG = 1


def end_with_parent(expected: int | None = None) -> None:
    """From now on this process is killed, without a word, as soon as its parent has ended. The main thread calls it.

    ``expected`` is the parent's pid where the caller knows it: where that process is not the parent, it has ended
    already, and this one ends at once.
    """
    parent = os.getppid()
    if expected is not None and parent != expected:
        end()
    if not _forked_by_main_thread(parent):
        _watch(lambda: os.getppid() == parent)
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended in between
        end()


def end_with_launcher(launcher: int) -> None:
    """For a rank that the launcher's fork server has forked: it ends with that one, which ends with the launcher.

    Ends this process at once where one of the two has ended already.
    """
    assert "parallel.processes.tied" in sys.modules, (
        "the fork server cannot import Roundtable; install it, or set PYTHONPATH"
    )
    end_with_parent()
    if sys.platform == "linux" and parent_of(os.getppid()) != launcher:
        end()


def end_with_job() -> None:
    """For a rank that torchrun or srun has started: it ends with the agent or the step daemon.

    Between a step daemon and the rank may be others, such as a shell or a container's runtime: it ends with each of
    them. Where the parent is in another PID namespace, its end cannot be seen.
    """
    end_with_parent()
    line = lineage_to(STEP_DAEMON)
    if len(line) > 1:
        _watch(lambda: lineage_to(STEP_DAEMON) == line)


def end() -> None:
    """Kills this process, which says nothing and runs nothing more."""
    os.kill(os.getpid(), signal.SIGKILL)


def lineage_to(name: str) -> list[int]:
    """The pids from this process's parent up to the nearest ancestor that runs the program; empty where none does."""
    line, pid = [], os.getppid()
    while pid > 1:
        line.append(pid)
        if _program_of(pid) == name:
            return line
        pid = parent_of(pid)
    return []


def parent_of(pid: int) -> int:
    """A process's parent; 0 where that cannot be seen, or there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _program_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _forked_by_main_thread(parent: int) -> bool:
    """Whether the parent's main thread forked this process: the kernel's signal comes when the thread ends that did."""
    try:
        return str(os.getpid()) in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:  # no Linux, or not to be seen from here
        return False


def _watch(holds: Callable[[], bool]) -> None:
    """Ends this process soon after ``holds()`` has become false."""

    def look() -> None:
        while holds():
            time.sleep(LOOK_SECONDS)
        end()

    threading.Thread(target=look, name="lifeline", daemon=True).start()
