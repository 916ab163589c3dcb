"""Starts a job's ranks as local processes: if one fails, all are ended at once, and no process is left behind."""

import contextlib
import errno
import gc
import math
import multiprocessing
import os
import pickle
import random
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from parallel.processes.environment import TOKEN
from parallel.processes.lifeline import LAUNCHER, end_with_launcher
from parallel.processes.stop import STOP_SIGNALS, forwarding, held_back

# What the fork server imports once, so that a rank starts in a tenth of a second instead of 13 (8 ranks with DeepSpeed:
# 13.6 s -> 1.3 s, 2 cores, 2026-11-20).
PRELOAD = [
    "parallel.processes.tied",  # first, so that a launcher's end is seen while the others are imported
    "torch",
    "torch._dynamo",
    "torch.distributed.pipelining",
    "parallel.zero.patches",
    "parallel.zero.later_imports",
]


LOOPBACK = "lo" if sys.platform == "linux" else "lo0"  # the interface of 127.0.0.1
FIRST_PORT = 20000  # below are the ports of known services

# A process that has asked CUDA itself for its GPUs cannot be forked; with this variable set, torch asks NVML instead.
COUNT_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"

# How long the launcher waits for the other ranks to report a cause, where so far it knows only that ranks lost a
# connection or exited with a code.
LINGER_SECONDS = 15.0


# The exit code that multiprocessing reports when the fork server, which alone knows the true one, has ended.
UNKNOWN_CODE = 255
LONGEST_TMPDIR = 75  # bytes: a socket's path has at most 107, and multiprocessing's ends in two names of 16 bytes
SERVER_KILLED = "the fork server that started it was killed, most likely for want of memory"
SERVER_GONE = "the fork server ended; the reason is above, or it was killed, most likely for want of memory"


class RankError(Exception):
    """A rank failed. The message names the rank that was the cause, with its traceback if there is one."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.stop_asked = False  # whether the ranks had been asked to stop


@dataclass
class _Child:
    rank: int
    place: str
    process: Any
    results: Connection


@dataclass
class _Failure:
    """How one rank failed. Of several failures, the one with the lowest ``order`` is the likeliest cause."""

    order: int
    message: str
    exit_code: int

    @property
    def is_cause(self) -> bool:
        """Whether it explains itself: no lost connection does, nor an exit, whose reason another rank may report."""
        return self.order not in (EXITED, CUT)


# Values of ``_Failure.order``. An exit comes before TOLD, by which other ranks report that a rank is gone.
KILLED, RAISED, EXITED, TOLD, ENDED, CUT = range(6)


def run_ranks(
    function: Callable[..., Any],
    n_ranks: int,
    *arguments: Any,
    timeout_seconds: float | None = None,
    threads: int | None = None,
    preload: Sequence[str] = (),
    passes_stop: bool = False,
    places: Sequence[str] | None = None,
) -> list[Any]:
    """The results, by rank, of ``function(*arguments)`` in ``n_ranks`` new processes that can open a mesh.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set in each process, and ports are opened on the
    loopback interface alone. When a process fails, or ``timeout_seconds`` have passed, all others are killed (stopped
    ones too) and RankError is raised. Function, arguments and results must be picklable. ``threads`` sets each rank's
    torch threads (default: OMP_NUM_THREADS, or else cores / ranks). ``preload`` names further modules that the fork
    server imports, once for all ranks. ``passes_stop``: requests to stop are passed on to the ranks, which receive them
    by ``parallel.processes.stop.hearing``. ``places`` are the ranks' names in messages
    (``parallel.mesh.Degrees.places``).
    """
    context = fork_server(preload)
    threads = threads or _threads_asked_for() or max(1, (os.cpu_count() or 1) // n_ranks)
    call = pickle.dumps((function, arguments))  # multiprocessing itself would send each tensor by a file, 251 at most
    children = []
    with claimed_port() as port, forwarding() if passes_stop else contextlib.nullcontext() as forwarder:
        try:
            for rank, of_rank in enumerate(rank_environments(n_ranks, port)):
                receive, send = context.Pipe(duplex=False)
                # This process's present variables: the fork server has those of the time when it was started.
                environment = {**os.environ, **of_rank}
                process = context.Process(
                    target=_rank_main, args=(send, os.getpid(), environment, threads, call), daemon=True
                )
                with held_back() if passes_stop else contextlib.nullcontext():
                    _start(process)
                send.close()
                place = f"{places[rank] if places is not None else f'rank {rank}'} of {n_ranks}"
                children.append(_Child(rank, place, process, receive))
                if forwarder is not None and process.pid is not None:
                    forwarder.add(process.pid)
            return _collect(children, timeout_seconds)
        except RankError as error:
            error.stop_asked = forwarder is not None and forwarder.request.signal is not None
            raise
        finally:
            _end(children)


def _threads_asked_for() -> int | None:
    """OMP_NUM_THREADS, at most the number of this machine's cores; None if it is unset or not a number.

    Sums over another number of threads round differently: a job on a cluster sets it to 1, and a local run must be able
    to do the same.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2" is for nested regions
    return min(int(asked), os.cpu_count() or 1) if asked.isdecimal() and int(asked) else None


def fork_server(preload: Sequence[str] = ()) -> ForkServerContext:
    """The context by which ranks are forked from one server process, which has imported what they need.

    The server is a child of this process, and ends with it. Raises OSError where TMPDIR is too long a path for the
    sockets that are made there.
    """
    temporary = tempfile.gettempdir()
    if len(os.fsencode(temporary)) > LONGEST_TMPDIR:
        rule = f"may have at most {LONGEST_TMPDIR} bytes, for the sockets of local processes"
        raise OSError(errno.ENAMETOOLONG, rule, f"TMPDIR={temporary}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault(COUNT_BY_NVML, "1")  # read where torch is imported
    return context


def _start(process: Any) -> None:
    try:
        process.start()
    except (EOFError, ConnectionError):
        raise RankError(f"no rank could be started: {SERVER_GONE}", 1) from None


def rank_environments(n_ranks: int, port: int) -> list[dict[str, str]]:
    """The environment variables of each rank of a new job on this machine, by rank, with a token of the job's own."""
    token = secrets.token_hex(16)
    common = {
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        TOKEN: token,
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(n_ranks)]


@contextlib.contextmanager
def claimed_port() -> Iterator[int]:
    """A free port, which while entered no other launcher on this machine takes before rank 0 listens there.

    It is below the ports that Linux gives to outgoing connections, any of which could take it in the meantime.
    """
    drawn = random.SystemRandom()  # no two launchers the same
    with contextlib.ExitStack() as stack:
        while True:
            port = drawn.randrange(FIRST_PORT, _first_outgoing_port())
            with contextlib.suppress(OSError), socket.socket() as listener:
                listener.bind(("127.0.0.1", port))
                stack.enter_context(_claim(port))
                break
        yield port


def _claim(port: int) -> contextlib.AbstractContextManager[Any]:
    """A claim on the port by an abstract Unix socket, a name that one process at a time can have.

    Raises OSError where another process has it. A socket on the port itself would keep rank 0 from listening there.
    """
    if sys.platform != "linux":
        return contextlib.nullcontext()
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0roundtable-port-{port}")
    except OSError:
        claim.close()
        raise
    return claim


def _first_outgoing_port() -> int:
    """The first of the ports that Linux gives to outgoing connections (by default 32768)."""
    setting = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(setting.read_text().split()[0]) if setting.exists() else 32768
    return first if first > FIRST_PORT + 1000 else 32768


_to_launcher: Connection | None = None  # in a process that run_ranks started: the pipe for its answer


def _rank_main(send: Connection, launcher_pid: int, environment: dict[str, str], threads: int, call: bytes) -> None:
    global _to_launcher
    gc.freeze()  # the fork server's imports stay: collecting garbage among them would copy pages, 0.2 s of each rank
    end_with_launcher(launcher_pid)
    os.environ.update(environment)
    import torch

    torch.set_num_threads(threads)
    _to_launcher = send
    try:
        function, arguments = pickle.loads(call)
        result = function(*arguments)
    except SystemExit as stop:
        _send(send, ("exit", stop.code if isinstance(stop.code, int) else 1))
        raise
    except BaseException as error:
        _send(send, ("error", traceback.format_exc(), getattr(error, "exit_code", 1), is_lost_connection(error)))
        os._exit(1)  # prints nothing: the launcher prints the traceback, once
    _send(send, ("done", result))


def has_launcher() -> bool:
    """Whether ``run_ranks`` started this process, so that a launcher sees it and every other rank end."""
    return _to_launcher is not None


def tell_launcher(message: str, exit_code: int) -> None:
    """Sends the launcher the reason why all ranks are to end, as this process's answer. Any thread may call it."""
    assert _to_launcher is not None
    _send(_to_launcher, ("told", message, exit_code))


def is_lost_connection(error: BaseException | None) -> bool:
    """Whether an exception, or one that led to it, says that another rank did not answer, not that this one failed."""
    import torch.distributed as dist

    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL")
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _send(send: Connection, message: Any) -> None:
    """Sends a message to the launcher by plain pickle; torch's way of sending tensors would need this process to stay.

    A launcher that no longer listens, since it was told to end at once, is no failure of this process.
    """
    message = pickle.dumps(message)
    with contextlib.suppress(BrokenPipeError):
        send.send_bytes(message)


def _collect(children: list[_Child], timeout_seconds: float | None) -> list[Any]:
    """The ranks' results, by rank. Raises RankError with the likeliest cause if any failed, or at the time limit."""
    deadline = math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    waiting = {child.results: child for child in children}
    while waiting and not any(failure.is_cause for failure in failures):
        left = max(0.0, deadline - time.monotonic())
        ready = wait(list(waiting), None if math.isinf(left) else left)
        if not ready and not failures:
            late = ", ".join(child.place for child in waiting.values())
            raise RankError(f"no answer within {timeout_seconds} s from {late}; all ranks were ended", 1)
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            child = waiting.pop(connection)
            answer = _receive(child)
            if isinstance(answer, _Failure):
                failures.append(answer)
                deadline = min(deadline, time.monotonic() + LINGER_SECONDS)
            else:
                results[child.rank] = answer
    if failures:
        cause = min(failures, key=lambda failure: failure.order)
        raise RankError(cause.message, cause.exit_code)
    return [results[child.rank] for child in children]


def _receive(child: _Child) -> Any:
    """The result of the rank's function, or a _Failure."""
    try:
        message = pickle.loads(child.results.recv_bytes())
    except (EOFError, ConnectionError):
        child.process.join(5)
        code = child.process.exitcode
        if code is not None and code < 0:
            return _Failure(KILLED, f"{child.place} ended by signal {signal.Signals(-code).name}", 1)
        if code == UNKNOWN_CODE:
            return _Failure(KILLED, f"{child.place} ended: {SERVER_KILLED}", 1)
        return _Failure(ENDED, f"{child.place} ended by exit code {code}", 1)
    match message:
        case ("done", result):
            return result
        case ("told", text, code):
            return _Failure(TOLD, text, code)
        case ("exit", code):
            return _Failure(EXITED, f"{child.place} exited with code {code}", code)
        case ("error", text, code, is_lost):
            return _Failure(CUT if is_lost else RAISED, f"{child.place} failed:\n{text}", code)
    raise AssertionError(message)


def _end(children: list[_Child]) -> None:
    """Ends all ranks, after a short wait. A handler that raises meanwhile, as on a second Ctrl-C, ends them at once.

    None may be left to multiprocessing, which at Python's end sends them SIGTERM and waits for them without a limit.
    """
    try:
        for child in children:
            if child.process.is_alive():
                child.process.join(2 if child.results.closed else 0.2)
    finally:
        with _undisturbed():
            for child in children:
                if child.process.is_alive():
                    child.process.kill()
    for child in children:
        child.process.join(10)
        child.results.close()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """While entered, signals whose handlers may raise are blocked. Meant for work that takes no time."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGHUP, *STOP_SIGNALS])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
