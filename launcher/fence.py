"""The fencing token: a number in the run directory that each start raises.

A process that was cut off (a dead network, a stopped node) and comes back finds a larger number than its own, and can
neither commit a checkpoint nor append to metrics.jsonl. Looking and writing happen under one lock, so nothing slips
in between.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parallel.checkpoint.errors import BrokenSave

FENCE = ".fence"
LOCK_SECONDS = 180  # a lock is held for one write; that of a node that died falls after its file system's lease


class StaleRun(BrokenSave):
    """The run was started again elsewhere: this process must write nothing more, and end."""


@dataclass(frozen=True)
class Fence:
    """What a start got: the run directory, and the number that is in its fence file as long as no later start is."""

    run_path: Path
    token: int

    @contextmanager
    def held(self) -> Iterator[None]:
        """The only time in which this process may change the run directory. Raises StaleRun, OSError (no lock)."""
        with _locked(self.run_path) as handle:
            latest = _read(handle)
            if latest != self.token:
                raise StaleRun(
                    f"{self.run_path} was started again (start {latest}) after this process's start {self.token}; "
                    "this process writes nothing more and ends"
                )
            yield


def raise_fence(run_path: Path) -> Fence:
    """Shuts out whoever wrote in the run directory so far. One process calls it, for all ranks of its start."""
    with _locked(run_path) as handle:
        token = _read(handle) + 1
        os.pwrite(handle, b"%020d\n" % token, 0)
        os.fsync(handle)
    return Fence(run_path, token)


def _read(handle: int) -> int:
    return int(os.pread(handle, 64, 0) or b"0")


@contextmanager
def _locked(run_path: Path) -> Iterator[int]:
    """The fence file, opened and locked. Opened each time: so that NFS looks at the server's copy."""
    handle = os.open(run_path / FENCE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(handle):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"another process held its lock for {LOCK_SECONDS} s", FENCE)
            time.sleep(0.05)
        yield handle
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
