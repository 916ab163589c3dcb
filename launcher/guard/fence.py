"""The fencing token: a number in the run directory that each start increases.

A process that was cut off (a dead network, a stopped node) and comes back finds a larger number than its own, and then
neither commits a checkpoint nor appends to metrics.jsonl. The number is checked, and the files are written, under one
lock, so that no other start can come in between.
"""

import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from parallel.checkpoint.errors import BrokenSave

FENCE = ".fence"
LONGEST = 64  # bytes read of the file: more than the number ever has
ENDS = "; this process writes nothing more and ends, and a new start goes on from the last checkpoint that is there"
LOCK_SECONDS = 180  # a lock is held for one write; a dead node's is released when its file system's lease expires


class StaleRun(BrokenSave):
    """The run was started again elsewhere, or its files were taken away: this process must write nothing more, and end.

    The message is one line that says so.
    """


@dataclass(frozen=True)
class Fence:
    """A start's token: the number in the run directory's fence file, until a later start increases it."""

    run_path: Path
    token: int

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which this process may change the run directory: it is locked, and no later start has begun.

        Raises StaleRun where a later start has increased the token, or the fence file was removed or changed, and
        OSError where the lock is not free within LOCK_SECONDS.
        """
        with _locked(self.run_path, self._open()) as handle:
            latest = _token(os.pread(handle, LONGEST, 0))
            if latest is not None and latest > self.token:
                raise StaleRun(
                    f"{self.run_path} was started again (start {latest}) after this process's start {self.token}; "
                    "this process writes nothing more and ends"
                )
            if latest != self.token:
                raise StaleRun(f"{self.run_path / FENCE} was changed while the run trained{ENDS}")
            yield

    def _open(self) -> int:
        try:
            return os.open(self.run_path / FENCE, os.O_RDWR)
        except (FileNotFoundError, NotADirectoryError):
            raise StaleRun(f"{self.run_path / FENCE} was taken away while the run trained{ENDS}") from None


def raise_fence(run_path: Path) -> Fence:
    """Increases the token in the run directory, which shuts out all earlier starts; returns the new fence.

    One process calls it, for all ranks of its start. The fence file, if there is one, must hold a token or be empty
    (``why_no_token``).
    """
    with _locked(run_path, os.open(run_path / FENCE, os.O_RDWR | os.O_CREAT, 0o666)) as handle:
        token = (_token(os.pread(handle, LONGEST, 0)) or 0) + 1
        os.pwrite(handle, b"%020d\n" % token, 0)
        os.fsync(handle)
    return Fence(run_path, token)


def why_no_token(path: Path) -> str | None:
    """The rule that a fence file's content breaks; None where a start can raise it."""
    with path.open("rb") as file:
        text = file.read(LONGEST)
    if not text or _token(text) is not None:
        return None
    return f"{path} must hold the number of the run's last start; remove it once no process of this run lives"


def _token(text: bytes) -> int | None:
    """The number; None where the text is not one that a start wrote."""
    return int(text) if re.fullmatch(rb"\d{1,20}\n?", text) else None


@contextmanager
def _locked(run_path: Path, handle: int) -> Iterator[int]:
    """A context in which the fence file's ``handle`` is locked; it is closed afterwards.

    The file is opened anew each time, so that NFS reads the server's copy.
    """
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while not _try_lock(handle):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    errno.ETIMEDOUT, f"another process held its lock for {LOCK_SECONDS} s", str(run_path / FENCE)
                )
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
