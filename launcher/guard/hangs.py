"""The verdict from the ranks' heartbeats: which rank is dead, silent, late or failed, and what each was doing.

Nothing here communicates; ``launcher.guard.watchdog`` does.
"""

import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from parallel.mesh import AXES, Mesh
from parallel.processes.waits import Call, Waits

CUT_SECONDS = 10.0  # how long a rank that lost a connection waits to learn which rank ended
SHOWN_RANKS = 8  # ranks that a message describes; the log files have all of them
ENDED = (  # on CUDA torch's NCCL watchdog ends a process after a communication error
    "ended without a message (killed, ended by NCCL after a communication error, or its node is down; see its output)"
)
NOBODY_LATE = "nobody is late: each rank has begun what the others wait for, and a device or the network holds it up"
WRAPPER = str(Path(__file__).parents[2] / "parallel" / "processes" / "waits.py")  # in every waiting stack: left out
OURS = tuple(str(Path(__file__).parents[2] / package) for package in ("launcher", "parallel", "modeling", "data"))


@dataclass
class Seen:
    """What rank 0 knows about a rank."""

    heard: float  # when its last message arrived (monotonic seconds of rank 0)
    beat: dict[str, Any] = field(default_factory=dict)  # its last heartbeat: step, phase, age, limit, key, own
    failed: tuple[str, int] | None = None  # an exception of its own, in one line, and the exit code
    cut: tuple[float, str] | None = None  # when and how it lost a connection
    gone: bool = False  # its process ended without a message
    left: bool = False  # it ended in the normal way


@dataclass(frozen=True)
class Verdict:
    """The reason why all ranks end: rank 0 finds it and sends it to all."""

    kind: Literal["failed", "gone", "hang", "cut"]
    text: str  # the reason, in one line
    rank: int | None = None  # the rank at fault, where it is known before the ranks have reported
    exit_code: int = 1

    def to_json(self) -> dict[str, Any]:
        """The verdict as a message to the other ranks."""
        return asdict(self)


@dataclass(frozen=True)
class Report:
    """What a rank was doing when the verdict came."""

    rank: int
    step: int
    phase: str
    age: float  # seconds in that phase
    where: str  # the innermost line of Roundtable's code that its main thread is in
    waits: dict[str, Any] | None  # operation, axis, ranks (as runs_of_ranks), group, number, peer, seconds
    counts: dict[str, int]  # group's name -> collectives begun there
    by_axis: dict[str, int] = field(default_factory=dict)  # collectives begun by the axes' names, which all ranks share
    stage: int = 0  # place on pp: ranks of one stage run the same program


def flight_record() -> bytes:
    """The record that torch keeps of this process's latest communications (Flight Recorder), pickled; may be empty.

    With NCCL it says which of them the device has begun and completed. The call may wait for the device.
    """
    if os.environ.get("TORCH_FR_BUFFER_SIZE") == "0":
        return b""
    names = ("_dump_nccl_trace", "_dump_fr_trace")  # the first exists in builds with NCCL, which record to it
    dump = next((getattr(c10d, name) for name in names if hasattr(c10d, name)), bytes)
    return dump()


def judge(seen: Mapping[int, Seen], places: Sequence[str], now: float) -> Verdict | None:
    """The reason to end all ranks; None where there is none. The most certain kind of reason comes first."""
    for rank, state in seen.items():
        if state.failed is not None:
            return Verdict("failed", f"{places[rank]} failed: {state.failed[0]}", rank, state.failed[1])
    for rank, state in seen.items():
        if state.gone:
            return Verdict("gone", f"{places[rank]} {ENDED}", rank)
    for rank, state in seen.items():
        silent = now - state.heard
        if state.beat and not state.left and silent > state.beat["limit"]:
            silence = f"has not been heard of for {silent:.0f} s (stopped, or cut off)"
            return Verdict("hang", f"{places[rank]} {silence}; {limit_in_words(state.beat)}", rank)
    for state in seen.values():
        beat = state.beat
        if beat and not state.left and beat["age"] > beat["limit"]:
            what = f"step {beat['step']}" if beat["phase"] == "step" else f"{beat['phase']} after step {beat['step']}"
            return Verdict("hang", f"{what} has taken {beat['age']:.0f} s; {limit_in_words(beat)}")
    for rank, state in seen.items():
        if state.cut is not None and now - state.cut[0] > CUT_SECONDS:
            return Verdict("cut", f"{places[rank]} lost a connection to another rank: {state.cut[1]}")
    return None


def limit_in_words(beat: Mapping[str, Any]) -> str:
    """A phrase with the limit that was exceeded, and the config key that raises it."""
    return f"the limit is {beat['limit']:.0f} s ({beat['key']})"


def explain(
    verdict: Verdict, reports: Mapping[int, Report], seen: Mapping[int, Seen], places: Sequence[str], now: float
) -> tuple[int | None, str]:
    """(rank that holds up the others or None, message): the verdict, that rank, and what other ranks wait for."""
    lines = [verdict.text]
    culprit = verdict.rank
    if verdict.kind in ("hang", "cut"):
        culprit, why = _find_culprit(verdict, reports, seen, places, now)
        if why:
            lines.append(why)
        others = [reports[rank] for rank in sorted(reports) if rank != culprit]
        lines += [f"  {places[report.rank]} {describe_report(report)}" for report in others[:SHOWN_RANKS]]
    return culprit, "\n".join(lines)


def _find_culprit(
    verdict: Verdict, reports: Mapping[int, Report], seen: Mapping[int, Seen], places: Sequence[str], now: float
) -> tuple[int | None, str]:
    silent = [rank for rank, state in seen.items() if rank not in reports and not state.left]
    if silent:
        named = _first_ones([places[rank] for rank in silent])
        last = max(now - seen[rank].heard for rank in silent)
        return silent[0], f"missing: {named}, last heard of {last:.0f} s ago"
    at_work = [report for report in reports.values() if report.waits is None and not seen[report.rank].left]
    known: dict[
        tuple[str, int], bool
    ] = {}  # by group and number: ranks that wait there together wait for the same ones
    late = at_work or [report for report in reports.values() if not _has_to_wait(report, reports, known)]
    if not late:  # all wait for each other
        strayed = _out_of_step(list(reports.values()))
        if strayed is None:
            return None, "every rank waits for another"
        return strayed.rank, f"out of step with the others: {places[strayed.rank]} {describe_report(strayed)}"
    if not at_work and len(late) == len(reports) > 1 and len({report.step for report in late}) == 1:
        return None, NOBODY_LATE
    slowest = min(late, key=lambda report: (report.step, report.rank))
    return slowest.rank, f"slowest: {places[slowest.rank]} {describe_report(slowest)}"


def _out_of_step(reports: Sequence[Report]) -> Report | None:
    """The rank whose collectives came in another order than those of most ranks of its stage; None where none differs.

    Of two ranks that run the same program, one has begun at least as many collectives as the other on every axis.
    """
    orders = Counter((report.stage, frozenset(report.by_axis.items())) for report in reports)
    of_order = {
        (stage, order): sum(
            count * _is_another_order(dict(order), dict(other))
            for (other_stage, other), count in orders.items()
            if other_stage == stage
        )
        for stage, order in orders
    }
    strange = {report.rank: of_order[report.stage, frozenset(report.by_axis.items())] for report in reports}
    ranked = sorted(reports, key=lambda report: -strange[report.rank])
    if len(ranked) < 2 or strange[ranked[0].rank] == strange[ranked[1].rank]:
        return None
    return ranked[0]


def _is_another_order(ours: Mapping[str, int], theirs: Mapping[str, int]) -> bool:
    differences = [ours.get(axis, 0) - theirs.get(axis, 0) for axis in ours.keys() | theirs.keys()]
    return min(differences, default=0) < 0 < max(differences, default=0)


def counts_by_axis(counts: Mapping[str, int], mesh: Mesh) -> dict[str, int]:
    """Axes' name -> the number of collectives begun on them, summed over their groups on this rank."""
    found: dict[str, int] = {}
    for group, count in counts.items():
        axis, _ = find_axis(Call("", group, 0), mesh)
        found[axis] = found.get(axis, 0) + count
    return found


def _has_to_wait(report: Report, reports: Mapping[int, Report], known: dict[tuple[str, int], bool]) -> bool:
    """Whether some rank has not yet begun the communication in which this one waits. ``known`` caches answers."""
    waits = report.waits
    if waits is None or waits["peer"] is not None:
        return waits is not None
    there = waits["group"], waits["number"]
    if there not in known:
        others = (reports[rank] for rank in unrolled(waits["ranks"]) if rank in reports)
        known[there] = any(other.counts.get(there[0], 0) < there[1] for other in others)
    return known[there]


def runs_of_ranks(ranks: Sequence[int]) -> list[list[int]]:
    """A group's ranks in compressed form: [first rank, count, stride] of each run."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == 1:
            runs[-1][1:] = [2, rank - runs[-1][0]]
        elif runs and rank == runs[-1][0] + runs[-1][1] * runs[-1][2]:
            runs[-1][1] += 1
        else:
            runs.append([rank, 1, 1])
    return runs


def unrolled(runs: Sequence[Sequence[int]]) -> list[int]:
    """The ranks of the runs that ``runs_of_ranks`` made."""
    return [first + number * stride for first, count, stride in runs for number in range(count)]


def _first_ones(names: Sequence[Any]) -> str:
    """The first SHOWN_RANKS names, and how many more there are."""
    more = f" and {len(names) - SHOWN_RANKS} more" if len(names) > SHOWN_RANKS else ""
    return ", ".join(map(str, names[:SHOWN_RANKS])) + more


def describe_report(report: Report) -> str:
    """What a rank is doing, in words."""
    where = f"in step {report.step}" if report.phase == "step" else f"in {report.phase} after step {report.step}"
    if report.waits is None:
        return f"is at work {where}, at {report.where}"
    return f"waits {where} {describe_wait(report.waits)}, at {report.where}"


def describe_wait(waits: Mapping[str, Any]) -> str:
    """A communication in words: "in all_reduce over dp (ranks 0, 2), number 31 there, for 9.1 s"."""
    who = f" with rank {waits['peer']}" if waits["peer"] is not None else ""
    ranks = _first_ones(unrolled(waits["ranks"]))
    numbered = "" if waits["peer"] is not None else f", number {waits['number']} there"
    return f"in {waits['operation']}{who} over {waits['axis']} (ranks {ranks}){numbered}, for {waits['seconds']:.1f} s"


def report_waits(waits: Waits, mesh: Mesh) -> dict[str, Any] | None:
    """The communication that holds up this process, in the form of ``Report.waits``; None where there is none.

    On gloo it is the one in which the main thread (else another) waits; on CUDA, failing that, the last one begun.
    """
    main = threading.main_thread().ident
    held = [waits.current[thread] for thread in sorted(waits.current, key=lambda thread: thread != main)]
    now = time.monotonic()
    call, since = held[0] if held else (waits.last if mesh.device.type == "cuda" else None, now)
    if call is None:
        return None
    axis, ranks = find_axis(call, mesh)
    peer = None if call.peer is None else ranks[call.peer]
    return {**asdict(call), "peer": peer, "axis": axis, "ranks": runs_of_ranks(ranks), "seconds": now - since}


def find_axis(call: Call, mesh: Mesh) -> tuple[str, list[int]]:
    """The axes whose group the call is in ("dp", "dp = edp"), or whose group contains it, and the group's ranks."""
    names = []
    for name in AXES:
        axis = getattr(mesh, name)
        if axis.degree > 1 and axis.group is not None and axis.group.group_name == call.group:
            names.append(name)
    for group in dist.distributed_c10d._world.pg_names:
        if group.group_name == call.group:
            ranks = dist.get_process_group_ranks(group)
            within = [name for name in AXES if len(ranks) > 1 and set(ranks) < set(getattr(mesh, name).ranks)]
            return " = ".join(names or within[:1]) or "all ranks", ranks
    return " = ".join(names) or call.group, []


def main_line() -> str:
    """The innermost line of Roundtable's code that the main thread is in: file, line and function."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and not _is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "no Python code"
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _is_ours(file: str) -> bool:
    return file.startswith(OURS) and file != WRAPPER


def stacks() -> str:
    """The Python stacks of all threads of this process, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(frame))}" for thread, frame in frames
    )
