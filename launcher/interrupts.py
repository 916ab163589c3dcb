"""Ctrl-C while libraries are imported, which takes seconds, and on the way out."""

import _thread
import os
import signal
import time
from types import FrameType

AGAIN_SECONDS = 0.05
INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended, by itself or by what it raised


def hold_interrupts_while_importing() -> None:
    """An interrupt that arrives during an import is raised after it. The main thread calls it.

    torch and numpy import each other from C code, which drops the exception and goes on with a library half made.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def leave_at_interrupt() -> None:
    """A second interrupt, on the way out, ends the process at once. The main thread calls it."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if not _is_importing(frame):
        signal.default_int_handler(signum, frame)
    _thread.start_new_thread(_again, (signum,))  # without the locks of threading, which an import may hold


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False


def _again(signum: int) -> None:
    time.sleep(AGAIN_SECONDS)
    os.kill(os.getpid(), signum)
