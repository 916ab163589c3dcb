"""The watchdog: a thread beside each rank's loop that detects ranks which die, hang or fall silent, and ends the job.

Each rank tells rank 0 its step, phase and time in that phase over a connection of the thread's own
(``parallel.processes.heartbeat``). When a rank is gone, silent or beyond its time limit, every rank writes the Python
stacks of its threads and the communication in which it waits to RUN_DIR/logs/rank-N.txt, rank 0 names the rank at
fault, and all end. The threads work while the main threads are blocked in a collective; where even they cannot run (a
native call that holds Python's global lock), faulthandler's own thread writes the stacks and ends the process.
"""

import contextlib
import faulthandler
import os
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Any, Self

from launcher.config.tree import RunConfig
from launcher.console import tell
from launcher.guard.hangs import (
    CUT_SECONDS,
    Report,
    Seen,
    Verdict,
    counts_by_axis,
    describe_wait,
    explain,
    flight_record,
    judge,
    main_line,
    report_waits,
    stacks,
)
from launcher.guard.stragglers import OwnTimes, Stragglers
from launcher.watch.watchers import NullWatchers, Watchers
from parallel.mesh import Degrees, Mesh, wait_for_all
from parallel.pipeline.stages import work_of_ranks
from parallel.processes.heartbeat import Heart, Message, open_heart
from parallel.processes.start import has_launcher, is_lost_connection, tell_launcher
from parallel.processes.waits import Waits

LOGS = "logs"
FLIGHT_RECORD = "flight-rank-"  # in LOGS, before the rank: what torch recorded of its communications
STEP = "step"  # the phase whose limit is train.step_timeout_seconds; all others are slow
SLOW_FACTOR = 3  # a slow phase (start, first step, evaluation, checkpoint) without progress may take so many timeouts
LONGEST_FACTOR = 3  # with train.step_timeout_seconds=null, a step may take so many times the longest one before
REPORT_SECONDS = 10.0  # a rank that has sent nothing for so long, when all are asked for reports, is missing
TELL_SECONDS = 45.0  # given to metrics.jsonl and W&B for writing the last event; W&B gives up after 30
LAUNCHER_SECONDS = 10.0  # given to a launcher that sees a rank end, to kill the others: it takes far less
WORDS_A_SECOND = 400  # messages that rank 0 takes: above 800 ranks each rank sends fewer than one in 2 seconds


class Watchdog:
    """One rank's watchdog, entered after the mesh is open; leaving it is collective where nothing went wrong.

    The loop calls ``beat`` when it begins a step or another phase, and runs within ``recording``.
    """

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        self.mesh = mesh
        self.places = Degrees.of(config.parallel, mesh.world_size).places()
        self.timeout = float(config.train.timeout_seconds)
        self.step_timeout = config.train.step_timeout_seconds
        self.batches = config.train.batches
        shortest = min(self.timeout, self.step_timeout or self.timeout)
        self.interval = min(max(2.0, mesh.world_size / WORDS_A_SECOND), max(0.1, shortest / 20))
        self.report_seconds = max(REPORT_SECONDS, 3 * self.interval)
        self.log_path = config.run_path / LOGS / f"rank-{mesh.rank}.txt"
        self.watchers: Watchers | NullWatchers = NullWatchers()
        self.waits = Waits()
        self.step, self.phase, self.since = 0, "start", time.monotonic()
        self.steps_done, self.begun = 0, 0
        self.longest = 0.0  # the most seconds a step took for each of its sequences: batches may grow
        self.own_times, self.held_before = OwnTimes(), 0.0
        self.news: deque[dict[str, Any]] = deque()  # events for the main thread to pass on
        now = time.monotonic()
        self.seen = {rank: Seen(now) for rank in (range(mesh.world_size) if mesh.rank == 0 else (0,))}
        work = work_of_ranks(config.model, config.parallel.pipeline, config.parallel.pp)
        self.stragglers = Stragglers(Degrees.of(config.parallel, mesh.world_size).stages(), work)
        self.reports: dict[int, Report] = {}
        self.own_end: Message | None = None  # "failed", "cut" or "bye", to be sent by the thread
        self.has_news = False  # the thread has received something that cannot wait for its next turn
        self.is_raising = False  # the main thread is raising an exception, which the launcher will report
        self.over = threading.Event()  # set once the thread has nothing more to do
        self.heart: Heart | None = None
        self.log: IO[str] | None = None
        self.thread = threading.Thread(target=self.run, name="watchdog", daemon=True)

    # The main thread's calls.

    def beat(self, step: int, phase: str) -> None:
        """Records that the main thread begins ``phase`` of ``step`` or makes progress in it, and logs queued events."""
        now = time.monotonic()
        if self.phase == STEP and (step, phase) != (self.step, STEP):
            self.steps_done += 1
            if self.steps_done > 1:
                self.longest = max(self.longest, (now - self.since) / self.batches.size_at(self.step))
                self.own_times.add(now - self.since, self.waits.seconds - self.held_before)
        self.step, self.phase, self.since, self.held_before = step, phase, now, self.waits.seconds
        while self.news:
            self.watchers.event({"step": step - 1 if phase == STEP else step, **self.news.popleft()})

    def __enter__(self) -> Self:
        """Opens the log and the connection, and starts the thread. All ranks call it."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log = self.log_path.open("a")
        self.heart = open_heart(self.mesh, os.environ.get("MASTER_ADDR", "127.0.0.1"))
        self.waits.install()
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback_: TracebackType | None
    ) -> None:
        """Leaves together with all ranks, which is collective; after an error, reports that instead (``fail``)."""
        if error is None:
            self.beat(self.step, "end")
            wait_for_all(self.mesh)
            self.own_end = {"bye": True}
            self.settle()
        else:
            self.fail(error)
        if not self.is_raising:
            faulthandler.cancel_dump_traceback_later()
            self.waits.remove()
            self.close_log()

    @contextlib.contextmanager
    def recording(self, watchers: Watchers | NullWatchers, together: type[Exception]) -> Iterator[None]:
        """A context in which the watchdog logs events to ``watchers``, the last one before a failure closes them.

        ``together``: an exception that all ranks raise at once, and that is no failure.
        """
        self.watchers = watchers
        try:
            yield
        except together:
            raise
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Reports this rank's error to rank 0, and waits for the verdict. Only the first call has an effect.

        Where ``run_ranks`` started the process, an error of its own is left to the launcher, which prints it.
        """
        if self.own_end is not None or self.is_raising:
            return
        if not isinstance(error, Exception):  # an exit or an interrupt, on purpose
            self.own_end = {"bye": True}
        elif is_lost_connection(error):
            self.write(traceback.format_exc())
            self.own_end = {"cut": _in_a_line(error)}
        else:
            self.write(traceback.format_exc())
            if has_launcher():
                self.is_raising = True
                return  # the launcher prints the traceback and ends all ranks
            self.own_end = {"failed": _in_a_line(error), "code": exit_code_of(error)}
        self.settle()

    def settle(self) -> None:
        """Makes the thread send this rank's last message, and waits until the thread is done, for a bounded time."""
        assert self.heart is not None
        self.heart.wake()
        self.over.wait(2 * self.interval + self.report_seconds + TELL_SECONDS)

    # The thread.

    def run(self) -> None:
        """Runs ``keep_watch`` until this rank leaves or the job ends; ends the process if the watchdog itself fails."""
        try:
            self.keep_watch()
        except BaseException:  # a watchdog that has failed must not let a job go on unwatched
            self.tell(f"{self.places[self.mesh.rank]}: its watchdog failed:\n{traceback.format_exc()}", 1)
            os._exit(1)

    def keep_watch(self) -> None:
        """The thread's loop: it sends, and judges what arrived, every ``interval``, or at once where a rank ends.

        An arriving heartbeat does not begin a turn, or ranks would answer each other without pause.
        """
        heart = self.heart
        assert heart is not None and self.log is not None
        now = turned = next_turn = time.monotonic()
        said: Message | None = None
        while True:
            arrived = heart.poll(max(0.0, next_turn - now))
            now = time.monotonic()
            if now - turned > max(5.0, 5 * self.interval):  # this process itself was stopped: no other rank was late
                self.restart_clocks(now)
            for rank, message in arrived:
                self.take(rank, message, now)
            own_end = self.own_end  # read once: "bye" must have been sent before we go, and the main thread sets it
            if now < next_turn and not self.has_news and own_end is said:
                continue
            turned, said, self.has_news = now, own_end, False
            next_turn = now + min(self.interval, CUT_SECONDS)
            faulthandler.dump_traceback_later(self.limit() + self.interval + 30, exit=True, file=self.log)
            self.send_own(heart, now, own_end)
            if own_end is not None and "bye" in own_end:
                heart.close()
                self.over.set()
                return
            self.name_stragglers()
            self.apply_own_limit(now)
            verdict = judge(self.seen, self.places, now)
            if verdict is not None:
                self.end(verdict, heart)
                return

    def send_own(self, heart: Heart, now: float, own_end: Message | None) -> None:
        """Sends this rank's heartbeat, with its last message ``own_end`` if there is one."""
        beat = {
            "step": self.step,
            "phase": self.phase,
            "age": self.age(now),
            "limit": self.limit(),
            "key": self.limit_key(),
            "own": self.own_times.figure(),
        }
        message: Message = {"beat": beat, **(own_end or {})}
        if self.mesh.rank == 0:
            self.take(0, message, now)
            message = {"pulse": beat} if "bye" not in message else {"bye": True}
        heart.send(message)

    def name_stragglers(self) -> None:
        """On rank 0, queues an event for each slow rank, which the main thread logs."""
        figures = {rank: state.beat["own"] for rank, state in self.seen.items() if state.beat.get("own") is not None}
        for slow in self.stragglers.find(figures, self.step) if self.mesh.rank == 0 else []:
            row = {"event": "straggler", "rank": slow.rank, "place": self.places[slow.rank]}
            self.news.append({**row, "ratio": slow.ratio, "own_seconds": slow.seconds})

    def take(self, rank: int, message: Message | None, now: float) -> None:
        """Records a message from a rank; None means that its connection has ended."""
        state = self.seen[rank]
        state.heard = now
        if message is None:
            state.gone = not state.left and state.failed is None
            self.has_news |= state.gone
            return
        if "beat" in message:
            state.beat = message["beat"]
        if "pulse" in message:  # rank 0 judges its own age
            state.beat = {**message["pulse"], "age": 0.0}
        if "report" in message:
            self.reports[rank] = Report(**message["report"])
        if "bye" in message:
            state.left = True
        if "failed" in message:
            state.failed = (message["failed"], message["code"])
            self.has_news = True
        if "cut" in message and state.cut is None:
            state.cut = (now, message["cut"])
        if "verdict" in message:
            self.end_by(Verdict(**message["verdict"]))

    def apply_own_limit(self, now: float) -> None:
        """On a rank other than 0 that is itself beyond its limit: judges rank 0's silence by this rank's limit.

        Rank 0's last message may be from a slow phase, whose limit is many times that of a step.
        """
        first, limit = self.seen[0], self.limit()
        if self.mesh.rank != 0 and self.age(now) > limit and now - first.heard > limit:
            first.beat = {"age": 0.0, **first.beat, "limit": limit, "key": self.limit_key()}

    def restart_clocks(self, now: float) -> None:
        """Counts every rank's silence and age from now on, after this process itself was stopped for a while."""
        self.since = now
        for state in self.seen.values():
            state.heard = now
            if state.beat:
                state.beat["age"] = 0.0

    def is_slow(self) -> bool:
        """Whether the phase is one that may take long: any but a step, and the first step."""
        return self.phase != STEP or self.steps_done == 0

    def age(self, now: float) -> float:
        """Seconds since the main thread's last ``beat``, or in slow phases its last begun communication, if later."""
        if self.is_slow() and self.waits.begun != self.begun:
            self.since = now
        self.begun = self.waits.begun
        return now - self.since

    def limit(self) -> float:
        """The time limit of the present phase, in seconds."""
        if self.is_slow():
            return SLOW_FACTOR * max(self.timeout, self.step_timeout or 0.0)
        if self.step_timeout is not None:
            return float(self.step_timeout)
        return max(0.9 * self.timeout, LONGEST_FACTOR * self.longest * self.batches.size_at(self.step))

    def limit_key(self) -> str:
        """The config key that sets the limit."""
        is_own = self.step_timeout is not None and not self.is_slow()
        return "train.step_timeout_seconds" if is_own else "train.timeout_seconds"

    # The end.

    def own_report(self) -> Report:
        """The report of what this rank is doing now."""
        return Report(
            rank=self.mesh.rank,
            step=self.step,
            phase=self.phase,
            age=time.monotonic() - self.since,
            where=main_line(),
            waits=report_waits(self.waits, self.mesh),
            counts=dict(self.waits.counts),
            by_axis=counts_by_axis(dict(self.waits.counts), self.mesh),
            stage=self.mesh.pp.rank,
        )

    def write_report(self, verdict: Verdict) -> Report:
        """Writes the verdict and this rank's stacks to its log; returns the rank's report."""
        report = self.own_report()
        waiting = describe_wait(report.waits) if report.waits is not None else "in no communication"
        place = f"{self.places[self.mesh.rank]}, process {os.getpid()} on {socket.gethostname()}"
        self.write(
            f"{verdict.text}\n{place}: {report.phase} {report.step} for {report.age:.1f} s, {waiting}\n{stacks()}"
        )
        return report

    def write_flight_record(self, verdict: Verdict) -> None:
        """Saves torch's record of recent communications for ``torchfrtrace``, where communication has stopped."""
        if verdict.kind in ("hang", "cut"):
            with contextlib.suppress(Exception):  # whatever becomes of it, the ranks must end
                if record := flight_record():
                    (self.log_path.parent / f"{FLIGHT_RECORD}{self.mesh.rank}").write_bytes(record)

    def end(self, verdict: Verdict, heart: Heart) -> None:
        """Ends the job by the verdict, and this process.

        Rank 0 tells all ranks, collects their reports and names the rank at fault. Another rank comes here only where
        rank 0 itself is at fault, and ends with the verdict alone.
        """
        if verdict.kind == "gone" and has_launcher():
            time.sleep(LAUNCHER_SECONDS)
        if self.mesh.rank == 0:
            heart.send({"verdict": verdict.to_json()})
            self.reports[0] = self.write_report(verdict)
            self.collect_reports(heart)
            culprit, message = explain(verdict, self.reports, self.seen, self.places, time.monotonic())
            self.record(verdict, culprit, message)
        else:
            self.write_report(verdict)
            message = verdict.text
        if self.mesh.rank <= 1:
            self.tell(f"{message}\nall ranks end; what each was doing is in {self.log_path.parent}", verdict.exit_code)
        self.write_flight_record(verdict)
        heart.send({"done": True})
        self.leave(verdict.exit_code)

    def end_by(self, verdict: Verdict) -> None:
        """On ranks other than 0: writes stacks, sends a report to rank 0, and ends once rank 0 has told the user."""
        heart = self.heart
        assert heart is not None
        report = self.write_report(verdict)
        heart.send({"report": vars(report)})
        self.write_flight_record(verdict)
        deadline = time.monotonic() + self.report_seconds + TELL_SECONDS
        while time.monotonic() < deadline:
            if any(message is None or "done" in message for _, message in heart.poll(self.interval)):
                break
        self.leave(verdict.exit_code)

    def collect_reports(self, heart: Heart) -> None:
        """Waits for the reports of all ranks that still send messages."""
        while True:
            now = time.monotonic()
            heard = [rank for rank, state in self.seen.items() if now - state.heard < self.report_seconds]
            if all(rank in self.reports or self.seen[rank].left or self.seen[rank].gone for rank in heard):
                return
            for rank, message in heart.poll(self.interval):
                if message is None or "report" in message:  # a beat from before the verdict is no sign of life
                    self.take(rank, message, now)

    def record(self, verdict: Verdict, culprit: int | None, message: str) -> None:
        """Logs the event "ranks_ended" to metrics.jsonl and W&B and closes them, within TELL_SECONDS."""
        row: dict[str, Any] = {"step": self.step, "event": "ranks_ended", "kind": verdict.kind, "message": message}
        if culprit is not None:
            row |= {"rank": culprit, "place": self.places[culprit]}

        def write() -> None:
            with contextlib.suppress(Exception):  # whatever a watcher raises, the ranks must end
                self.watchers.event(row)
            with contextlib.suppress(Exception):
                self.watchers.close(exit_code=1)

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        writer.join(TELL_SECONDS)

    def tell(self, message: str, exit_code: int) -> None:
        """Prints the message to the user, through the launcher where there is one."""
        if has_launcher():
            tell_launcher(message, exit_code)
        else:
            tell(message)

    def leave(self, exit_code: int) -> None:
        """Ends this process at once, or after LAUNCHER_SECONDS where its own exception ended the job.

        The main thread raises that exception within this time.
        """
        self.close_log()
        if self.is_raising or (self.own_end is not None and "failed" in self.own_end):
            self.over.set()
            time.sleep(LAUNCHER_SECONDS)
        os._exit(exit_code)

    def write(self, text: str) -> None:
        """Appends to this rank's log. Errors of a full disk are ignored, so that the job is still judged and ended."""
        if self.log is not None and not self.log.closed:
            with contextlib.suppress(OSError):
                self.log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
                self.log.flush()

    def close_log(self) -> None:
        """Closes the log, and removes it if it is empty."""
        if self.log is not None:
            with contextlib.suppress(OSError):  # a full disk has no room for what still waits
                self.log.close()
            with contextlib.suppress(OSError):
                if self.log_path.stat().st_size == 0:
                    self.log_path.unlink()


def nccl_seconds(config: RunConfig) -> int:
    """The timeout of NCCL's collectives in seconds: longer than this watchdog lets any phase take but long steps.

    NCCL's own watchdog ends a process by SIGABRT, before the rank at fault is named.
    """
    train = config.train
    return (SLOW_FACTOR + 1) * max(train.timeout_seconds, train.step_timeout_seconds or 0)


def exit_code_of(error: BaseException) -> int:
    """The exit code that an exception leads to: 2 for the user's mistake, 1 for anything else."""
    from data.errors import DataError
    from launcher.errors import UserError

    return 2 if isinstance(error, (DataError, UserError)) else 1


def _in_a_line(error: BaseException) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
