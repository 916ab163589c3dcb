"""Folders that are there whole or not at all: made under a hidden name beside their own, and renamed at the end."""

import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.partial import partial_suffix, sync_folder

KILLED = 128  # exit code, plus the signal's number


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """The folder to fill, which becomes ``out``, durably, when the block ends, and is gone where it fails.

    SIGTERM is such a failure: a job's end leaves nothing, and the exit code is what a shell expects of it. ``out`` must
    not be there, or be an empty folder.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden = out.with_name(f".{out.name}.{partial_suffix()}")
    with _raising_at_sigterm():
        hidden.mkdir()
        try:
            yield hidden
            sync_folder(hidden)
            hidden.rename(out)
            sync_folder(out.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)  # gone already where the rename was reached


@contextmanager
def _raising_at_sigterm() -> Iterator[None]:
    def end(signum: int, _: object) -> None:
        raise SystemExit(KILLED + signum)

    if threading.current_thread() is not threading.main_thread():  # which alone may say what a signal does
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
