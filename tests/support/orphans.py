"""Kills a process while it works, and checks that none of the processes that it started outlives it."""

import os
import signal
import time
from collections.abc import Callable, Iterable

import psutil

ORPHAN_SECONDS = 10.0  # what docs/failures.md promises


def tree_of(pid: int) -> list[psutil.Process]:
    """The process and all its descendants, also those in sessions of their own."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def programs(tree: Iterable[psutil.Process]) -> dict[int, str]:
    """The command line of each process by pid, cut at 150 characters."""
    return {process.pid: " ".join(process.cmdline())[:150] for process in tree}


def lives(process: psutil.Process) -> bool:
    """Whether the process is still running; a zombie is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_and_see_all_end(pid: int, tree: Iterable[psutil.Process], signum: int = signal.SIGKILL) -> None:
    """Kills one process of the tree; fails where another one is still alive 10 seconds later."""
    tree = list(tree)
    told = programs(tree)
    os.kill(pid, signum)
    left = wait_for(lambda: [process for process in tree if lives(process)])
    try:
        assert not left, f"left after {ORPHAN_SECONDS:g} s: { {each.pid: told[each.pid] for each in left} }"
    finally:
        for process in left:
            process.kill()


def wait_for(remaining: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """Waits until no process remains, for ORPHAN_SECONDS at most; returns those that do."""
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (left := remaining()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
