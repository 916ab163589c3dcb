"""A run of some hundred steps, measured from within: each rank's memory at each step, and its watchdog's time."""

import gc
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.training.run_dir import claim
from parallel.processes.start import run_ranks

FIRST = 10  # what comes before fills caches: the heap, torch's and DeepSpeed's first allocations


@dataclass
class Measured:
    """One rank's figures."""

    resident: list[int] = field(default_factory=list)  # bytes after each step
    seconds: float = 0.0  # from step FIRST to the last one
    own: float = 0.0  # of the process on a core meanwhile
    watchdog: float = 0.0  # of its watchdog's thread

    @property
    def growth(self) -> int:
        """Bytes by which the last hundred steps' highest mark lies above that of the hundred from FIRST on.

        The garbage collector runs every hundred steps, so each has one whole turn of what waits for it.
        """
        return max(self.resident[-100:]) - max(self.resident[FIRST : FIRST + 100])


def run_measured(config: Any, n_ranks: int, leaks: bool = False) -> list[Measured]:
    """Each rank's figures of the real loop."""
    with claim(config):
        options: dict[str, Any] = {"timeout_seconds": 280, "threads": 1, "preload": ["launcher.training.loop"]}
        return run_ranks(train_measured, n_ranks, config, leaks, **options)


def train_measured(config: Any, leaks: bool) -> Measured:
    """One rank."""
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
    """Seconds: by the wall, of this process on a core, of its watchdog's thread on a core."""
    (watchdog,) = [thread for thread in threading.enumerate() if thread.name == "watchdog"]
    clock = time.pthread_getcpuclockid(watchdog.ident or 0)
    return time.monotonic(), time.process_time(), time.clock_gettime(clock)


def resident_bytes() -> int:
    """Of this process, by the kernel's count."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
