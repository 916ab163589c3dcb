"""A run of some hundred steps that measures each rank's memory after each step, and its watchdog's processor time."""

import gc
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.training.run_dir import claim
from parallel.processes.start import run_ranks

FIRST = 10  # the first measured step; earlier ones fill caches, the heap, torch's and DeepSpeed's first allocations


@dataclass
class Measured:
    """One rank's figures."""

    resident: list[int] = field(default_factory=list)  # bytes after each step
    seconds: float = 0.0  # from step FIRST to the last one
    own: float = 0.0  # processor seconds of the process in that time
    watchdog: float = 0.0  # processor seconds of its watchdog's thread in that time

    @property
    def growth(self) -> int:
        """Bytes by which the peak of the last hundred steps exceeds that of the hundred steps from FIRST on.

        The garbage collector runs every hundred steps, so each of the two spans holds one whole cycle of it.
        """
        return max(self.resident[-100:]) - max(self.resident[FIRST : FIRST + 100])


def run_measured(config: Any, n_ranks: int, leaks: bool = False) -> list[Measured]:
    """Trains with the real loop on ``n_ranks`` ranks; returns each rank's figures. ``leaks`` plants a memory leak."""
    with claim(config):
        options: dict[str, Any] = {"timeout_seconds": 280, "threads": 1, "preload": ["launcher.training.loop"]}
        return run_ranks(train_measured, n_ranks, config, leaks, **options)


def train_measured(config: Any, leaks: bool) -> Measured:
    """One rank of ``run_measured``."""
    import launcher.training.loop as loop
    import launcher.training.step as step

    measured, kept, began = Measured(), [], (0.0, 0.0, 0.0)
    run_step, add = loop.run_step, step.Sums.add

    def measuring(*arguments: Any) -> Any:
        nonlocal began
        done = run_step(*arguments)
        measured.resident.append(resident_bytes())
        if len(measured.resident) == FIRST:
            began = clocks()
        if len(measured.resident) == config.train.steps:
            measured.seconds, measured.own, measured.watchdog = (
                now - then for now, then in zip(clocks(), began, strict=True)
            )
        return done

    def keeping(sums: Any, output: Any) -> None:
        kept.append(output)
        add(sums, output)

    loop.run_step = measuring
    if leaks:
        step.Sums.add = keeping
    assert loop.train(config, []) == 0
    assert gc.isenabled() is False  # the loop collects, every hundred steps
    return measured


def clocks() -> tuple[float, float, float]:
    """Seconds of wall time, of this process's processor time, and of its watchdog thread's processor time."""
    (watchdog,) = [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    clock = time.pthread_getcpuclockid(watchdog.ident or 0)
    return time.monotonic(), time.process_time(), time.clock_gettime(clock)


def resident_bytes() -> int:
    """The resident memory of this process in bytes, as the kernel counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
