"""Ctrl-C while libraries are imported, which takes seconds, from a busy file server minutes, and on the way out."""

import _thread
import os
import signal
import time
from types import FrameType

AGAIN_SECONDS = 0.05
PATIENCE_SECONDS = 0.5  # within which interrupts are one: a shell's to the group, and one more to the process
INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended, by itself or by what it raised


def hold_interrupts_while_importing() -> None:
    """An interrupt that arrives during an import is raised after it, a second one ends the process at once.

    torch and numpy import each other from C code, which drops the exception and goes on with a library half made. The
    main thread calls it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Held().interrupt)


def leave_at_interrupt() -> None:
    """A second interrupt, on the way out, ends the process at once. The main thread calls it."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


class _Held:
    """An interrupt that waits for the end of an import."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.is_ours = False  # the signal that comes next is the one that was held

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """The handler."""
        is_ours, self.is_ours = self.is_ours, False
        if not _is_importing(frame):
            self.since = None
            signal.default_int_handler(signum, frame)
        now = time.monotonic()
        if self.since is None:
            self.since = now
        elif not is_ours:
            if now > self.since + PATIENCE_SECONDS:
                os._exit(INTERRUPTED)
            return
        _thread.start_new_thread(self.again, (signum,))  # without the locks of threading, which an import may hold

    def again(self, signum: int) -> None:
        """Asks once more, a moment later."""
        time.sleep(AGAIN_SECONDS)
        self.is_ours = True
        os.kill(os.getpid(), signum)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False
