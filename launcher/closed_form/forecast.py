"""Plans of jobs by closed forms: seconds of a step and peak memory with intervals, or why a row has no plan."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from launcher.closed_form.architecture import CannotPlan
from launcher.closed_form.gpus import Gpu, capacity, gpu_of
from launcher.closed_form.memory import memory_of
from launcher.closed_form.rows import GIB, Job, job_of
from launcher.closed_form.seconds import Batch
from launcher.closed_form.work import work_of
from launcher.config.yaml_text import read_yaml_file

FILE = Path(__file__).with_name("files") / "constants.yaml"
NATURAL_RANGE = (1.2, 2.0)  # imbalances of natural routing that an interval covers
DECILE = 1.2816  # standard deviations of a normal distribution from its median to its ninth tenth


@dataclass(frozen=True)
class Fitted:
    """The constants and intervals that `make plan-table` has fitted to published rows."""

    seconds: Mapping[str, float]
    memory: Mapping[str, float]
    intervals: Mapping[str, Sequence[float]]  # dense, MoE, memory -> logarithms of measurement over plan


@lru_cache
def fitted() -> Fitted:
    """The fitted constants in files/constants.yaml."""
    tree = read_yaml_file(FILE)
    return Fitted(tree["seconds"], tree["memory"], tree["intervals"])


def plan_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One plan for each row, in its order."""
    return [plan_row(row) for row in rows]


def plan_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of one row; where it cannot be planned, seconds and memory are None and ``reason`` says why."""
    try:
        job = job_of(row)
        return {"id": row.get("id"), **plan_job(job)}
    except CannotPlan as reason:
        return {"id": row.get("id"), "step_seconds": None, "peak_gb": None, "reason": str(reason)}


def plan_job(job: Job) -> dict[str, Any]:
    """The plan of a job; GB are 2^30 bytes, as in ``measured.mem_gb``. Raises CannotPlan."""
    return plan_on(job, gpu_of(job.gpu, job.per_node, job.interconnect))


def plan_on(job: Job, gpu: Gpu) -> dict[str, Any]:
    """The plan of a job on ``gpu``; GB are 2^30 bytes. Raises CannotPlan where the GPU lacks the job's precision."""
    known = fitted()
    parts = seconds_by_part(job, gpu)
    seconds = sum(parts.values())
    low, high = (math.exp(each) for each in known.intervals["dense" if job.kind == "dense" else "MoE"])
    fewest, most = seconds, seconds
    if job.natural_routing:
        fewest, most = (sum(seconds_by_part(replace(job, imbalance=each), gpu).values()) for each in NATURAL_RANGE)
        fewest, most = min(fewest, seconds), max(most, seconds)
    memory = memory_of(job)
    peak = memory.peak(known.memory)
    chance = chance_to_fit(peak, capacity(gpu), known.intervals["memory"])
    less, more = (math.exp(each) for each in known.intervals["memory"])
    return {
        "kind": job.kind,
        "gpu": gpu.hardware.name,
        "step_seconds": seconds,
        "step_seconds_low": fewest * low,
        "step_seconds_high": most * high,
        "tokens_per_second_per_gpu": job.tokens / seconds / job.n_gpus,
        "peak_gb": peak / GIB,
        "peak_gb_low": peak * less / GIB,
        "peak_gb_high": peak * more / GIB,
        "fits": peak <= capacity(gpu),
        "chance_to_fit": chance,
        "seconds_by_part": parts,
        "gb_by_part": {name: count / GIB for name, count in vars(memory).items()},
        "reason": None,
    }


def seconds_by_part(job: Job, gpu: Gpu) -> dict[str, float]:
    """Planned seconds of a step by part, such as products, attention and messages; they sum to the step."""
    batch = Batch([work_of(job, gpu)], [job], [gpu])
    return {name: float(value[0]) for name, value in batch.parts(fitted().seconds).items()}


def chance_to_fit(peak: float, room: float, interval: Sequence[float]) -> float:
    """The probability that a planned peak stays within ``room`` bytes.

    The logarithm of measurement over plan is taken to be normal, with its 10th and 90th percentile in ``interval``.
    """
    middle, spread = (interval[0] + interval[1]) / 2, (interval[1] - interval[0]) / (2 * DECILE)
    return 0.5 * (1 + math.erf((math.log(room / peak) - middle) / (spread * math.sqrt(2))))
