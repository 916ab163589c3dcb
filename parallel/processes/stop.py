"""Requests to stop: SIGTERM and SIGUSR1, as a rank hears them and as the process that started the ranks passes them on.

One request can arrive several times: `timeout`, Slurm and torchrun signal a process, its parent and its group. What
comes within REPEAT_SECONDS of the first is the same request; a later one means at once.
"""

import faulthandler
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STOPPED = 75  # exit code: stopped on request after saving, start me again (EX_TEMPFAIL of sysexits.h)
KILLED = 128  # exit code, plus the signal's number: ended at once
REPEAT_SECONDS = 1.0


class StopRequest:
    """Whether this process has been asked to stop; ``signal`` is the first signal, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.heard_at = 0.0

    def hear(self, signum: int) -> bool:
        """Takes note of a signal; returns whether it is a second request."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.heard_at = signum, now
            return False
        return now - self.heard_at >= REPEAT_SECONDS

    def votes(self) -> list[float]:
        """This rank's summand for each of STOP_SIGNALS, to be summed over all ranks along with something else."""
        return [float(self.signal == signum) for signum in STOP_SIGNALS]


def elected(votes: Sequence[float]) -> int | None:
    """The signal that the summed votes name; the first of STOP_SIGNALS where ranks have heard both."""
    return next((signum for signum, count in zip(STOP_SIGNALS, votes, strict=True) if count), None)


@contextmanager
def hearing(*, ends_at_second: bool) -> Iterator[StopRequest]:
    """Within, SIGTERM and SIGUSR1 are requests to this rank. The main thread calls it.

    A thread listens, since Python's own handlers wait while the main thread is inside a collective. With
    ``ends_at_second`` a second request ends the process; else whoever started the ranks sees to that.

    Ctrl-Z stops the process as ever. faulthandler's timer, which the watchdog sets anew at each of its turns, is
    cancelled before: it counts the time of the stop, and would end the process as soon as that goes on.
    """
    request = StopRequest()
    pauses = signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL  # ignored where a shell without job control began it
    heard = (*STOP_SIGNALS, signal.SIGTSTP) if pauses else STOP_SIGNALS
    read, write = os.pipe()
    os.set_blocking(write, False)

    def listen() -> None:
        while signals := os.read(read, 1):
            if signals[0] == signal.SIGTSTP and pauses:
                faulthandler.cancel_dump_traceback_later()
                os.kill(os.getpid(), signal.SIGSTOP)
            elif signals[0] in STOP_SIGNALS and request.hear(signals[0]) and ends_at_second:
                os._exit(KILLED + signals[0])

    before = {signum: signal.signal(signum, lambda *_: None) for signum in heard}
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="stop signals", daemon=True)
    thread.start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield request
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(write)
        thread.join()
        os.close(read)
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Forwarder:
    """The launching process's part: its first request goes on to every rank, a second one ends everything."""

    def __init__(self) -> None:
        self.request = StopRequest()
        self.pids: list[int] = []

    def add(self, pid: int) -> None:
        """A rank that has been started; it is told at once where the request came before it."""
        self.pids.append(pid)
        if self.request.signal is not None:
            self.tell([pid], self.request.signal)

    def hear(self, signum: int, _: Any = None) -> None:
        """The handler. Raises SystemExit at a second request."""
        first = self.request.signal is None
        if self.request.hear(signum):
            raise SystemExit(KILLED + signum)  # the ranks are killed on the way out
        if first:
            self.tell(self.pids, signum)

    def tell(self, pids: Sequence[int], signum: int) -> None:
        """Signals the ranks; one that has ended needs no word."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


@contextmanager
def forwarding() -> Iterator[Forwarder]:
    """Within, this process passes stop requests on to the ranks that are added. The main thread calls it."""
    forwarder = Forwarder()
    before = {signum: signal.signal(signum, forwarder.hear) for signum in STOP_SIGNALS}
    try:
        yield forwarder
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def ending(signals: Sequence[int] = STOP_SIGNALS, code: int | None = STOPPED) -> Iterator[None]:
    """Within, a request raises SystemExit, since no rank is there that would have to save. The main thread calls it.

    ``code`` is the exit code; None: 128 plus the signal's number, as a shell has it.
    """

    def end(signum: int, _: Any = None) -> None:
        raise SystemExit(KILLED + signum if code is None else code)

    heard = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]  # as nohup has it
    before = {signum: signal.signal(signum, end) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def undoing() -> Iterator[None]:
    """Within, SIGTERM and SIGHUP (a terminal that closes) raise SystemExit, so that blocks undo what they began.

    The exit code is what a shell expects. They and Ctrl-C, sent once more within REPEAT_SECONDS, do not interrupt the
    undoing. Without effect in other threads than the main one, which cannot hear.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [signal.SIGTERM, signal.SIGHUP]
    with ending(signals, code=None), heard_once([signal.SIGINT, *signals]):
        yield


@contextmanager
def heard_once(signals: Sequence[int]) -> Iterator[None]:
    """Within, what comes less than REPEAT_SECONDS after a signal whose handler raised something is the same request."""
    raised_at = -math.inf

    def once(handler: Callable[..., Any]) -> Callable[[int, Any], None]:
        def hear(signum: int, frame: Any = None) -> None:
            nonlocal raised_at
            if time.monotonic() - raised_at < REPEAT_SECONDS:
                return
            try:
                handler(signum, frame)
            except BaseException:
                raised_at = time.monotonic()
                raise

        return hear

    before = {signum: handler for signum in signals if callable(handler := signal.getsignal(signum))}
    for signum, handler in before.items():
        signal.signal(signum, once(handler))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Within, both signals wait, here and in the processes started here, for as long as those do not call ``hearing``.

    So none is lost while a rank starts, and one that goes to a whole group does not end a fork server and its ranks.
    """
    resource_tracker.ensure_running()  # which, started later within, would let SIGTERM through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
