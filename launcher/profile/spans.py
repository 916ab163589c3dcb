"""Turns the profiler's events into seconds by part: each moment of a step belongs to the innermost span at that time.

Host spans nest. What runs under a region's mark belongs to that region, and what runs in a node of the backward pass to
the region that created the node. On a GPU, time is that of its kernels, each of which belongs to where the host
launched it; time without a kernel is a wait for the host.
"""

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from launcher.trace.ops import ATTENTION, COLLECTIVES, PRODUCTS, Kind, Phase
from launcher.trace.parts import HOST, Axes, Region, part_of, wire_part
from launcher.trace.regions import MARK, Stretches
from modeling.kernels import attention_passes, expert_passes
from modeling.kernels.fused_delta import FUNCTION

NODE = "autograd::engine::evaluate_function: "
GLOO = "gloo:"
STEP = f"{MARK}bookkeeping forward"
WIRES = {  # a word in the names of gloo's and NCCL's events -> the name of the collective in COLLECTIVES
    "all_reduce": "all-reduce",
    "allreduce": "all-reduce",
    "all_gather": "all-gather",
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "reducescatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "send",
    "barrier": "barrier",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One of torch's events, in nanoseconds."""

    name: str
    begin: int
    end: int
    thread: int = 0
    node: int = -1  # autograd's sequence number
    is_async: bool = False
    on_gpu: bool = False
    number: int = 0  # the number of a host event
    launched_by: int = 0  # for a kernel, the number of the host event that launched it


@dataclass(frozen=True, slots=True)
class Place:
    """The part of the step to which a moment belongs.

    ``is_busy`` says that an operation runs, and not only the program around it.
    """

    region: Region
    phase: Phase
    kind: Kind = "other"
    collective: str | None = None
    name: str = ""
    is_busy: bool = False
    in_node: bool = False  # within a node of the backward pass, and no region's mark within that

    def part(self, axes: Axes) -> str:
        """The row of the table by part in which the moment counts."""
        if self.collective is not None:
            return wire_part(self.region, self.collective, axes)
        return part_of(self.region, self.kind)


NOWHERE = Place("other", "forward")
Times = dict[tuple[str, str, str], float]  # (part, phase, operation) -> seconds


def spans_of(events: Iterable[Any]) -> list[Span]:
    """The events of torch's profiler that take time (``profile.profiler.kineto_results.events()``)."""
    found = []
    for event in events:
        on_gpu = "CUDA" in str(event.device_type())
        begin = event.start_ns()
        span = Span(
            name=event.name(),
            begin=begin,
            end=begin + event.duration_ns(),
            thread=event.start_thread_id(),
            node=event.sequence_nr(),
            is_async=event.is_async(),
            on_gpu=on_gpu,
            number=event.correlation_id(),
            launched_by=event.linked_correlation_id(),
        )
        if not (on_gpu and span.name.startswith(MARK)):  # copies of the host's marks on the GPU's timeline
            found.append(span)
    return found


def wire_of(name: str) -> str | None:
    """The collective of a gloo or NCCL event, by its name; None for other events."""
    lowered = name.lower()
    if lowered.startswith(GLOO):
        return WIRES.get(lowered.removeprefix(GLOO).removesuffix("_"), "all-reduce")
    if "nccl" in lowered:
        squeezed = lowered.replace("_", "")
        return next((WIRES[word] for word in WIRES if word.replace("_", "") in squeezed), "all-reduce")
    return None


def place_within(span: Span, outer: Place, stretches: Stretches, again: dict[int, Region]) -> Place:
    """The place of what runs within ``span``, which itself lies in ``outer``.

    ``again`` holds the regions of autograd nodes that are created within other nodes, by recomputation; it is extended
    here from call to call.
    """
    if span.name.startswith(MARK):
        region, _, phase = span.name.removeprefix(MARK).partition(" ")
        assert region in get_args(Region) and phase in get_args(Phase), span.name
        return Place(region, phase)  # type: ignore[arg-type]
    if span.name.startswith(NODE):
        region = again[span.node] if span.node in again else stretches.at(span.node)
        name = span.name.removeprefix(NODE)
        kind: Kind = "attention" if name == f"{FUNCTION}Backward" else "other"
        return Place(region, "backward", kind, name=name, in_node=True)
    if outer.in_node and span.node >= 0:
        again[span.node] = outer.region
    namespace, _, name = span.name.rpartition("::")
    if namespace == "c10d" and name in COLLECTIVES:
        return replace(outer, collective=COLLECTIVES[name][0], name=name, is_busy=True)
    if outer.kind != "other" or outer.collective is not None:
        return replace(outer, is_busy=True)
    if name in PRODUCTS or name == expert_passes.NAME:
        return replace(outer, kind="product", name=name, is_busy=True)
    if name in ATTENTION or name == attention_passes.NAME:
        return replace(outer, kind="attention", name=name, is_busy=True)
    if name == FUNCTION:  # its kernels are not launched by an operation of torch
        return replace(outer, kind="attention", name=name, is_busy=True)
    if not namespace:  # the name of an autograd function, or a library's scope: no operation
        return outer
    return replace(outer, name=outer.name if outer.is_busy else name, is_busy=True)


def nested(spans: Sequence[Span], stretches: Stretches) -> Iterator[tuple[int, int, Place, Span | None]]:
    """The timeline of one thread's spans, in order: (begin, end, innermost place, the span that begins there or None).

    ``spans`` are all of one thread.
    """
    stack: list[tuple[int, Place]] = []
    again: dict[int, Region] = {}
    now = spans[0].begin if spans else 0
    for span in sorted(spans, key=lambda each: (each.begin, -each.end)):
        while stack and stack[-1][0] <= span.begin:
            end, place = stack.pop()
            yield now, end, place, None
            now = max(now, end)
        outer = stack[-1][1] if stack else NOWHERE
        yield now, span.begin, outer, None
        now = max(now, span.begin)
        inner = place_within(span, outer, stretches, again)
        yield now, now, inner, span
        stack.append((min(span.end, stack[-1][0]) if stack else span.end, inner))
    while stack:
        end, place = stack.pop()
        yield now, end, place, None
        now = max(now, end)


def steps_of(spans: Iterable[Span]) -> list[Span]:
    """The spans of whole steps: the outermost marks named STEP."""
    marks = sorted((span for span in spans if span.name == STEP and not span.on_gpu), key=lambda each: each.begin)
    found: list[Span] = []
    for mark in marks:
        if not found or mark.begin >= found[-1].end:
            found.append(mark)
    return found


def seconds_by_part(spans: Sequence[Span], stretches: Stretches, axes: Axes) -> Times:
    """Seconds of all steps together, by part, phase and operation. They always add up to the steps' time."""
    steps = steps_of(spans)
    if any(span.on_gpu for span in spans):
        return gpu_seconds(spans, steps, stretches, axes)
    return host_seconds(spans, steps, stretches, axes)


def host_seconds(spans: Sequence[Span], steps: Sequence[Span], stretches: Stretches, axes: Axes) -> Times:
    """The seconds on a CPU, by what the steps' own thread does or which message it waits for."""
    times: Times = defaultdict(float)
    mine = [span for span in spans if not span.is_async and steps and span.thread == steps[0].thread]
    waits = Waits([span for span in spans if wire_of(span.name) is not None])
    for begin, end, place, _ in nested(mine, stretches):
        for step in steps:
            first, last = max(begin, step.begin), min(end, step.end)
            if first >= last:
                continue
            waited = 0
            if not place.is_busy or place.collective is not None:
                for collective, wait in waits.within(first, last):
                    there = replace(place, collective=place.collective or collective)
                    times[there.part(axes), there.phase, f"wait for {there.collective}"] += wait / 1e9
                    waited += wait
            name = place.name if place.is_busy else "between operations"
            times[place.part(axes), place.phase, name] += (last - first - waited) / 1e9
    return dict(times)


class Waits:
    """The messages under way over time; the host waits for them when it does nothing else."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda each: each.begin)
        self.latest: list[int] = []  # the latest end among the spans up to each, ascending, for the search
        for span in self.spans:
            self.latest.append(max(span.end, self.latest[-1] if self.latest else 0))

    def within(self, begin: int, end: int) -> Iterator[tuple[str, int]]:
        """Pairs (collective, nanoseconds under way) between two moments; of several at once the first one counts."""
        place = bisect_left(self.latest, begin)
        now = begin
        for span in self.spans[place:]:
            if span.begin >= end:
                return
            first, last = max(now, span.begin), min(end, span.end)
            if first < last:
                yield wire_of(span.name) or "all-reduce", last - first
                now = last


def gpu_seconds(spans: Sequence[Span], steps: Sequence[Span], stretches: Stretches, axes: Axes) -> Times:
    """The seconds on a GPU, by the kernel that runs; time without a kernel counts as a wait for the host.

    Where several kernels run, one that computes is preferred to one that communicates.
    """
    launched: dict[int, Place] = {}
    for thread in {span.thread for span in spans if not span.on_gpu}:
        mine = [span for span in spans if span.thread == thread and not span.on_gpu and not span.is_async]
        for _, _, place, span in nested(mine, stretches):
            if span is not None:
                launched[span.number] = place
    kernels = [(span, kernel_place(span, launched)) for span in spans if span.on_gpu]
    times: Times = defaultdict(float)
    for step in steps:
        inside = [(span, place) for span, place in kernels if span.begin < step.end and span.end > step.begin]
        moments = sorted({step.begin, step.end, *(at for span, _ in inside for at in (span.begin, span.end))})
        moments = [at for at in moments if step.begin <= at <= step.end]
        starts = sorted(inside, key=lambda each: each[0].begin)
        running: list[tuple[Span, Place]] = []
        at = 0
        for first, last in itertools.pairwise(moments):
            while at < len(starts) and starts[at][0].begin <= first:
                running.append(starts[at])
                at += 1
            running = [each for each in running if each[0].end > first]
            seconds = (last - first) / 1e9
            if not running:
                times[HOST, "forward", "no kernel"] += seconds
                continue
            span, place = min(running, key=lambda each: each[1].collective is not None)
            times[place.part(axes), place.phase, span.name] += seconds
    return dict(times)


def kernel_place(span: Span, launched: dict[int, Place]) -> Place:
    """The place of a kernel: that of the host's span which launched it."""
    place = launched.get(span.launched_by, NOWHERE)
    collective = wire_of(span.name)
    return place if collective is None else replace(place, collective=collective)
