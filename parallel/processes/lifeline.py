"""Makes a process end when the one that started it ends, for whatever reason: killed, out of memory, crashed.

Where possible the kernel sends the signal (Linux's parent-death signal). That needs no Python, which could not run
while native code holds Python's lock, and it ends a stopped process too. Without it an orphaned rank would live on and
keep its GPU.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

LAUNCHER = "ROUNDTABLE_LAUNCHER"  # the variable with the pid of the launcher to which a fork server belongs
STEP_DAEMON = "slurmstepd"  # the program that starts the tasks of a Slurm step on a node
LOOK_SECONDS = 1.0
PR_SET_PDEATHSIG = 1
UNSEEN = (FileNotFoundError, ProcessLookupError, PermissionError)  # it has ended, or is not to be seen from here


def end_with_parent(expected: int | None = None) -> None:
    """Makes this process be killed (SIGKILL) as soon as its parent has ended. The main thread calls it.

    ``expected`` is the parent's pid, if the caller knows it: if the parent is another process, the expected one has
    ended already, and this process ends at once.
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
    """Makes a rank end with the fork server that forked it, which in its turn ends with the launcher.

    ``launcher`` is the launcher's pid. Ends this process at once if one of the two has ended already.
    """
    assert "parallel.processes.tied" in sys.modules, (
        "the fork server cannot import Roundtable; install it, or set PYTHONPATH"
    )
    end_with_parent()
    if sys.platform == "linux" and parent_of(os.getppid()) != launcher:
        end()


def end_with_job() -> None:
    """Makes a rank that torchrun or srun has started end with the agent or the step daemon that started it.

    There may be other processes between a step daemon and the rank, such as a shell or a container's runtime: the rank
    ends with any of them. Where the parent is in another PID namespace, its end cannot be seen.
    """
    end_with_parent()
    line = lineage_to(STEP_DAEMON)
    if len(line) > 1:
        _watch(lambda: lineage_to(STEP_DAEMON) == line)


def end() -> None:
    """Kills this process at once (SIGKILL): it prints nothing and runs no cleanup."""
    os.kill(os.getpid(), signal.SIGKILL)


def lineage_to(name: str) -> list[int]:
    """The pids from this process's parent up to its nearest ancestor that runs program ``name``; empty if none does."""
    line, pid = [], os.getppid()
    while pid > 1:
        line.append(pid)
        if _program_of(pid) == name:
            return line
        pid = parent_of(pid)
    return []


def parent_of(pid: int) -> int:
    """The pid of a process's parent; 0 where it cannot be seen, or there is no such process.

    Raises OSError where nothing can be told, as by a process that can open no more files.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except UNSEEN:
        return 0


def _program_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except UNSEEN:
        return ""


def _forked_by_main_thread(parent: int) -> bool:
    """Whether the parent's main thread forked this process.

    The kernel sends the parent-death signal when the thread ends that forked it, which may be before the parent ends.
    """
    try:
        return str(os.getpid()) in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:  # no Linux, or not to be seen from here
        return False


def _watch(holds: Callable[[], bool]) -> None:
    """Starts a thread that ends this process soon after ``holds()`` has become false.

    An OSError of ``holds()`` tells nothing: it looks again.
    """

    def look() -> None:
        held = True
        while held:
            time.sleep(LOOK_SECONDS)
            with contextlib.suppress(OSError):
                held = holds()
        end()

    threading.Thread(target=look, name="lifeline", daemon=True).start()
