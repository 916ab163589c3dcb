"""Running tasks, such as the shards of a corpus, on several processes.

Processes are spawned, not forked (the parent may have threads), and end when the parent is killed. Ending them takes no
lock, since a stopped worker may hold one, or an interrupted signal handler may have left one taken, forever.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from typing import Any

from data.errors import refuse
from data.shardtask import Report, ShardTask, StoppedError
from data.shardwriter import ShardRecord, write_shard

POLL_SECONDS = 0.1
END_SECONDS = 5.0  # a worker that does not end within this time (stopped, or stuck in a file system) is killed
PR_SET_PDEATHSIG = 1
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # their handlers, if set, raise
ShardFunction = Callable[[Any, Report, Callable[[], bool]], Any]  # (task, report, stopped)
_reports: "SimpleQueue[tuple[float, int, int]] | None" = None  # of this worker process
_stop: Connection | None = None  # readable (it holds a byte that nobody reads) once work is to stop


def write_shards(tasks: Sequence[ShardTask], workers: int | None, report: Report) -> list[ShardRecord]:
    """Writes all shards on ``workers`` processes (None: one for each core); returns their records, in any order.

    ``report`` is called in this process as they progress. Raises the first DataError of a shard after the others have
    stopped; finished shards stay.
    """
    return run_shards(write_shard, tasks, workers, report)


def run_shards(
    function: ShardFunction,
    tasks: Sequence[Any],
    workers: int | None,
    report: Report,
) -> list[Any]:
    """The results of ``function(task, report, stopped)`` for all tasks, in any order, on ``workers`` processes.

    ``report`` is called in this process with the tasks' progress; ``stopped()`` tells a task to raise StoppedError.
    """
    return run_in_processes(_run_one, [(function, task) for task in tasks], workers, report)


def run_in_processes(
    function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], workers: int | None, report: Report
) -> list[Any]:
    """The results of ``function(*arguments[i])`` for all i, in any order, computed on ``workers`` processes.

    Raises the first exception of a call, and DataError where a process was killed.
    """
    arguments = list(arguments)
    if not arguments:
        return []
    n_cores = workers or len(os.sched_getaffinity(0))
    n_processes = min(n_cores, len(arguments))
    context = multiprocessing.get_context("spawn")
    reports, (stopped, stop) = context.SimpleQueue(), context.Pipe(duplex=False)
    initial = (reports, stopped, n_cores // n_processes)
    others = set(multiprocessing.active_children())
    with (
        stopped,
        stop,
        _handlers_wait() as hear,
        ProcessPoolExecutor(n_processes, context, initializer=_begin, initargs=initial) as pool,
    ):
        try:
            with _interrupts_held_back():
                pending = {pool.submit(function, *values) for values in arguments}
            return list(_collect(pending, reports, report, hear))
        except BrokenProcessPool as error:
            found = f"data.workers={workers}"
            raise refuse(found, "had a process killed, most likely for want of memory", "set fewer workers") from error
        finally:
            stop.send_bytes(b"!")  # shards under way end at their next batch, and delete what they wrote
            ending = threading.Timer(END_SECONDS, _kill, (set(multiprocessing.active_children()) - others,))
            ending.start()
            pool.shutdown(wait=True, cancel_futures=True)
            ending.cancel()


@contextmanager
def _handlers_wait() -> Iterator[Callable[[], None]]:
    """A context in which signal handlers are deferred until the returned function is called, or until it ends well.

    An exception raised by a handler at any other place could leave the lock of a future taken, for which the pool's own
    thread would wait. Only the main thread defers handlers.
    """
    arrived: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    found = {int(signum): signal.getsignal(signum) for signum in ENDING_SIGNALS if is_main}
    handlers = {signum: handler for signum, handler in found.items() if callable(handler)}

    def hear() -> None:
        while arrived:
            signum = arrived.pop(0)
            handlers[signum](signum, None)

    for signum in handlers:
        signal.signal(signum, lambda signum, _: arrived.append(signum))
    try:
        yield hear
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    hear()


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """A context in which Ctrl-C is deferred; processes started within never receive it, since this one ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()


def _collect(
    pending: set[Any], reports: "SimpleQueue[tuple[float, int, int]]", report: Report, hear: Callable[[], None]
) -> Iterable[Any]:
    while pending:
        done, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        hear()
        while not reports.empty():
            report(*reports.get())
        for future in done:
            yield future.result()
    while not reports.empty():
        report(*reports.get())


def _begin(reports: "SimpleQueue[tuple[float, int, int]]", stop: Connection, n_threads: int) -> None:
    """Initializes a worker process: its queue, its number of threads, and its end with the parent process."""
    global _reports, _stop
    _reports, _stop = reports, stop
    os.environ["RAYON_NUM_THREADS"] = str(n_threads)  # the tokenizers library's threads
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if n_threads > 1 else "false"
    if sys.platform == "linux":  # this also ends a worker that is stopped, or in native code
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # sent when the parent's thread that started it ends
    threading.Thread(target=_end_with_parent, daemon=True).start()  # on other systems, and if the parent has ended


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _run_one(function: ShardFunction, task: Any) -> Any:
    reports, stop = _reports, _stop
    assert reports is not None
    assert stop is not None
    try:
        return function(task, lambda *progress: reports.put(progress), stop.poll)
    except StoppedError:
        return None
