"""Handling of Ctrl-C while libraries are imported (seconds, minutes from a busy file server) and during exit."""

import _thread
import os
import signal
import time
from types import FrameType

AGAIN_SECONDS = 0.05
PATIENCE_SECONDS = 0.5  # interrupts within it count as one: a shell's to the group, and another to the process
INTERRUPTED = 130  # the exit code of a command that Ctrl-C has ended, by itself or by what it raised


def hold_interrupts_while_importing() -> None:
    """Installs a SIGINT handler that delays an interrupt during an import to its end; a second one ends the process.

    torch and numpy import each other from C code, which would drop the exception and go on with a half-initialised
    library. The main thread must call it. Does nothing where SIGINT does not have Python's default handler.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Held().interrupt)


def leave_at_interrupt() -> None:
    """From here on an interrupt ends the process at once; for the way out. The main thread must call it."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


class _Held:
    """An interrupt that waits for the end of an import."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.is_ours = False  # the next signal is `again`'s repeat of the one that was held

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Handles SIGINT: raises KeyboardInterrupt outside of imports, and during one has the signal repeated soon."""
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
        """Sends the signal to this process once more after a short wait; runs in a thread of its own."""
        time.sleep(AGAIN_SECONDS)
        self.is_ours = True
        os.kill(os.getpid(), signum)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False
