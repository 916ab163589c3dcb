"""Requests to stop (SIGTERM and SIGUSR1): how a rank receives them, and how the launcher passes them on to its ranks.

One request can arrive several times, since `timeout`, Slurm and torchrun signal a process, its parent and its group. A
signal within REPEAT_SECONDS of the first is the same request; a later one means that the process should end at once.
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
STOPPED = 75  # exit code: stopped on request after saving, and can be started again (EX_TEMPFAIL of sysexits.h)
KILLED = 128  # exit code, plus the signal's number: ended at once
REPEAT_SECONDS = 1.0


class StopRequest:
    """Records whether this process has been asked to stop: ``signal`` is the first such signal, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.heard_at = 0.0

    def hear(self, signum: int) -> bool:
        """Records a signal; returns whether it is a second request."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.heard_at = signum, now
            return False
        return now - self.heard_at >= REPEAT_SECONDS

    def votes(self) -> list[float]:
        """For each of STOP_SIGNALS, 1.0 if it is this rank's first, else 0.0: summed over ranks for ``elected``."""
        return [float(self.signal == signum) for signum in STOP_SIGNALS]


def elected(votes: Sequence[float]) -> int | None:
    """The signal with votes in the sums over all ranks; the first of STOP_SIGNALS if both have some, None if none."""
    return next((signum for signum, count in zip(STOP_SIGNALS, votes, strict=True) if count), None)


@contextmanager
def hearing(*, ends_at_second: bool) -> Iterator[StopRequest]:
    """While entered, SIGTERM and SIGUSR1 are recorded as requests to stop. The main thread calls it.

    A thread receives them, since Python's own handlers do not run while the main thread is inside a collective. With
    ``ends_at_second`` a second request ends the process; otherwise that is left to the process that started the ranks.

    Ctrl-Z suspends the process as usual. faulthandler's timer, which the watchdog sets again and again, is cancelled
    first: it would count the time of the suspension, and end the process as soon as that continues.
    """
    request = StopRequest()
    pauses = signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL  # ignored if a shell without job control started it
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
    """The launcher's side of stop requests: the first goes on to every rank, a second one ends everything."""

    def __init__(self) -> None:
        self.request = StopRequest()
        self.pids: list[int] = []

    def add(self, pid: int) -> None:
        """Adds a rank that has been started; it is signalled at once if a request came before."""
        self.pids.append(pid)
        if self.request.signal is not None:
            self.tell([pid], self.request.signal)

    def hear(self, signum: int, _: Any = None) -> None:
        """Handles a signal: the first request is passed on to the ranks, a second one raises SystemExit."""
        first = self.request.signal is None
        if self.request.hear(signum):
            raise SystemExit(KILLED + signum)  # the ranks are killed on the way out
        if first:
            self.tell(self.pids, signum)

    def tell(self, pids: Sequence[int], signum: int) -> None:
        """Sends the signal to these processes; those that have ended are skipped."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


@contextmanager
def forwarding() -> Iterator[Forwarder]:
    """While entered, this process passes stop requests on to the ranks that are added. The main thread calls it."""
    forwarder = Forwarder()
    before = {signum: signal.signal(signum, forwarder.hear) for signum in STOP_SIGNALS}
    try:
        yield forwarder
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def ending(signals: Sequence[int] = STOP_SIGNALS, code: int | None = STOPPED) -> Iterator[None]:
    """While entered, a stop request raises SystemExit: for times when there is no rank that must save first.

    ``code`` is the exit code; None: 128 plus the signal's number, as shells report it. The main thread calls it.
    """

    def end(signum: int, _: Any = None) -> None:
        raise SystemExit(KILLED + signum if code is None else code)

    heard = [signum for signum in signals if signal.getsignal(signum) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {signum: signal.signal(signum, end) for signum in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def undoing() -> Iterator[None]:
    """While entered, STOP_SIGNALS and SIGHUP (a closed terminal) raise SystemExit, so ``finally`` blocks clean up.

    The exit code is 128 plus the signal's number, as shells expect. These signals and Ctrl-C, sent once more within
    REPEAT_SECONDS, do not interrupt the cleanup. It has no effect in threads other than the main one, which get no
    signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [*STOP_SIGNALS, signal.SIGHUP]
    with ending(signals, code=None), heard_once([signal.SIGINT, *signals]):
        yield


@contextmanager
def heard_once(signals: Sequence[int]) -> Iterator[None]:
    """While entered, signals within REPEAT_SECONDS after one whose handler raised an exception are ignored."""
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
    """While entered, STOP_SIGNALS are blocked here, and in processes started here until these call ``hearing``.

    So no request is lost while a rank starts, and one that is sent to a whole process group does not end a fork server
    and its ranks.
    """
    resource_tracker.ensure_running()  # if it were started while entered, it would unblock SIGTERM again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
