"""`roundtable plan CONFIG --as cpu`: seconds of a step by local processes on this machine, from rates measured now."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.config.tree import RunConfig
from launcher.console import tell
from launcher.estimate.command import answer_of
from launcher.processor.ops import Amounts, Ask
from launcher.processor.rates import Call, Machine, measure_rank, merged, slowest
from launcher.processor.seconds import step_seconds

TIMEOUT_SECONDS = 600.0
CROWD = 2  # processes per core that measure at the same time, so that the effect on each other's caches counts
Positions = list[dict[Ask, Amounts]]


def trace(path: Path, overrides: Sequence[str], world_size: int) -> Positions | None:
    """The work of each pipeline position, traced in a process of its own; None, with a line why, where that fails."""
    from launcher.processor.trace import from_rows

    request = {"config": str(path), "overrides": list(overrides), "world_size": world_size}
    answer = answer_of("launcher.processor.trace", request, "traces the step")
    return None if answer is None else [from_rows(rows) for rows in answer["positions"]]


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(positions: Sequence[Positions], world_size: int) -> Machine:
    """This machine's rates for all the work in ``positions`` (for each config), with ``world_size`` processes."""
    from parallel.processes.start import run_ranks

    asked = {ask for each in positions for found in each for ask in found}
    wires = sorted({(ask.kind, ask.dtype, ask.shape[0]) for ask in asked if ask.level == "wire" and ask.shape[0] > 1})
    plain = {ask._replace(phase="") for ask in asked if ask.level != "wire" and ask.kind != "call"}  # type: ignore[arg-type]
    busy = min(world_size, CROWD * cores())
    sent = wires if world_size > 1 else []
    found = run_ranks(measure_rank, world_size, sorted(plain), sent, busy, timeout_seconds=TIMEOUT_SECONDS, threads=1)
    return merged(cores(), busy, found)


def measure_host(config: RunConfig, world_size: int) -> Call:
    """The time of a call of torch under the config's layout, ZeRO stage and precision, from all ranks."""
    from launcher.processor.host import call_seconds
    from parallel.processes.start import run_ranks

    return slowest(run_ranks(call_seconds, world_size, config, world_size, timeout_seconds=TIMEOUT_SECONDS, threads=1))


def plan_here(config: RunConfig, path: Path, overrides: Sequence[str], world_size: int) -> dict[str, Any] | None:
    """The plan as JSON; None, with a line why, where the step cannot be traced. Raises UserError for a wrong config."""
    tell("tracing a step over fake tensors")
    positions = trace(path, overrides, world_size)
    if positions is None:
        return None
    tell(f"measuring what {min(world_size, cores())} of {cores()} cores do in a second")
    return as_json(config, world_size, positions, measure([positions], world_size), measure_host(config, world_size))


def as_json(config: RunConfig, world_size: int, positions: Positions, machine: Machine, call: Call) -> dict[str, Any]:
    """The planned step's seconds in all and by part, and tokens a second, as `--json` prints them."""
    seconds, shares = step_seconds(config, world_size, positions, machine, call)
    slowest = max(shares, key=lambda each: each.of())
    tokens = config.train.batches.sizes[-1] * config.data.seq_len
    return {
        "name": config.name,
        "processes": world_size,
        "cores": machine.cores,
        "share_of_a_core": machine.share,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "processor_seconds": sum(each.of() for each in shares) / len(shares),  # the mean over processes
        "seconds_by_part": slowest.parts(),  # at the slowest position, on a core of its own
        "seconds_a_call": call.processor,
        "calls": sum(calls for found in positions[:1] for ask, (calls, _) in found.items() if ask.kind == "call"),
    }
