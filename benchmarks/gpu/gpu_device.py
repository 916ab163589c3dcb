"""What is asked of a GPU, in functions that a CPU answers as well: waiting, time, memory, the host's waits, kernels."""

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

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
    """The median time of a call in seconds, all that the device does for it included."""
    for _ in range(warm_up):
        function()
    found = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        function()
        synchronize(device)
        found.append(time.perf_counter() - started)
    return statistics.median(found)


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
    places += [f"{each.filename}:{each.lineno}" for each in caught if WAIT_MESSAGE in str(each.message)]


def set_wait_warnings(device: torch.device, mode: str) -> None:
    """torch.cuda.set_sync_debug_mode, where there is CUDA."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def top_kernels(function: Callable[[], object], device: torch.device, count: int = 30) -> list[dict[str, Any]]:
    """The kernels that take most of the device's time in one call, with milliseconds and calls; on a CPU, operators."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        function()
        synchronize(device)
    rows = []
    for event in profiler.key_averages():
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        rows.append({"kernel": event.key[:160], "ms": round(microseconds / 1000, 3), "calls": event.count})
    return sorted(rows, key=lambda row: -row["ms"])[:count]


def is_usable(device: torch.device) -> bool:
    """Whether the device still answers: after an illegal access no later call in this process does."""
    try:
        synchronize(device)
        if device.type == "cuda":
            torch.ones(1, device=device).item()
    except RuntimeError:
        return False
    return True
