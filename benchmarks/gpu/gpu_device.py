"""What is asked of a GPU, in functions that a CPU answers as well: waiting, time, memory, the host's waits, kernels."""

import contextlib
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu_report import from_root
from gpu_turn import turn
from launcher.watch.speed import GIB, peak_memory_gib

WAIT_MESSAGE = "called a synchronizing CUDA operation"  # torch's warning (c10/cuda/CUDAFunctions.cpp)


def the_device(*, dry: bool) -> torch.device:
    """The first GPU; in a dry run the CPU."""
    return torch.device("cpu") if dry else torch.device("cuda", 0)


def hardware(device: torch.device) -> dict[str, Any]:
    """What the device is, and how many there are."""
    if device.type == "cpu":
        return {"name": "CPU", "count": 0}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": torch.cuda.get_device_name(device),
        "count": torch.cuda.device_count(),
        "gib": round(properties.total_memory / GIB, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def synchronize(device: torch.device) -> None:
    """Returns when the device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forget(device: torch.device) -> None:
    """Gives back memory that nothing holds, and starts the peak anew."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def held_bytes(device: torch.device) -> int:
    """What tensors hold on a GPU now; on a CPU, the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    import psutil

    return psutil.Process().memory_info().rss


def peak_gib(device: torch.device) -> float:
    """The most that was held since ``forget``; on a CPU, since the process began."""
    return peak_memory_gib(device)


def seconds_of(function: Callable[[], object], device: torch.device, *, repeats: int, warm_up: int = 2) -> float:
    """The median time of a call in seconds, from when the device is free until it has done all of the call's work."""
    for _ in range(warm_up):
        function()
    with turn():
        return statistics.median(one_call(function, device) for _ in range(repeats))


def one_call(function: Callable[[], object], device: torch.device) -> float:
    """Seconds between events on a GPU, which the host's own way back is no part of; on a CPU, by its clock."""
    synchronize(device)
    if device.type != "cuda":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    function()
    end.record()
    synchronize(device)
    return begin.elapsed_time(end) / 1000


@contextlib.contextmanager
def counting_waits(device: torch.device) -> Iterator[list[str]]:
    """Where the host waits for the GPU within the block: a list, filled at its end, of files and lines.

    torch warns of each such operation in its own threads as well, and hands the warnings on to the caller. A CPU has
    no such mode; what is counted is then what anybody warns of in the same words.
    """
    places: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        set_wait_warnings(device, "warn")
        try:
            yield places
        finally:
            set_wait_warnings(device, "default")
    places += [from_root(f"{each.filename}:{each.lineno}") for each in caught if WAIT_MESSAGE in str(each.message)]


def set_wait_warnings(device: torch.device, mode: str) -> None:
    """torch.cuda.set_sync_debug_mode, where there is CUDA."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


@dataclasses.dataclass(frozen=True)
class Profile:
    """One call, as the profiler saw it."""

    kernels: list[dict[str, Any]]  # those that take most of the device's time, with milliseconds and calls
    busy_ms: float  # in which the device did anything
    idle_ms: float  # between its first and its last kernel, in which it did nothing
    gaps: list[dict[str, Any]]  # the longest such times, each with the kernels before and after


def profiled(
    function: Callable[[], object], device: torch.device, count: int = 30, trace: Path | None = None
) -> Profile:
    """What the device does in one call; on a CPU, operators. ``trace``: where what runs when is written, for Perfetto.

    A name that ends in .gz is of a packed file.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        function()
        synchronize(device)
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    events = [each for each in profiler.events() if each.device_type == wanted and not is_annotation(each)]
    sums: dict[str, list[float]] = {}
    for event in events:
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        row = sums.setdefault(event.name, [0.0, 0])
        row[0] += microseconds / 1000
        row[1] += 1
    rows = [{"kernel": name[:400], "ms": round(ms, 3), "calls": calls} for name, (ms, calls) in sums.items()]
    busy_ms, gaps = busy_and_gaps([(each.time_range.start, each.time_range.end, each.name) for each in events])
    gaps.sort(key=lambda gap: -gap["ms"])
    return Profile(sorted(rows, key=lambda row: -row["ms"])[:count], busy_ms, sum(gap["ms"] for gap in gaps), gaps[:12])


def is_annotation(event: Any) -> bool:
    """Whether it is a name that somebody gave to a stretch of time, which the kernels in it count for."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(("Optimizer.", "ProfilerStep"))


def busy_and_gaps(spans: Sequence[tuple[float, float, str]]) -> tuple[float, list[dict[str, Any]]]:
    """Milliseconds in which one of the spans (microseconds, with a name) lasts, and the times between with none."""
    busy, gaps, end, before = 0.0, [], None, ""
    for start, stop, name in sorted(spans):
        if end is not None and start > end:
            gaps.append({"ms": round((start - end) / 1000, 3), "after": before[:80], "before": name[:80]})
        if end is None or stop > end:
            busy += stop - (start if end is None else max(start, end))
            end, before = stop, name
    return busy / 1000, gaps


def is_usable(device: torch.device) -> bool:
    """Whether the device still answers: after an illegal access no later call in this process does."""
    try:
        synchronize(device)
        if device.type == "cuda":
            torch.ones(1, device=device).item()
    except RuntimeError:
        return False
    return True
