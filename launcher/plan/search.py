"""Search for the fastest layouts of a config on a number of GPUs, planned by closed forms."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.closed_form.budget import MODES
from launcher.closed_form.forecast import fitted, plan_on, seconds_by_part
from launcher.closed_form.gpus import Gpu, capacity
from launcher.closed_form.memory import memory_of
from launcher.closed_form.own import job_of_config
from launcher.config.batch_rules import check_batch
from launcher.config.layout_rules import check_layout, with_switches
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.plan.corrections import Factors, factors_for
from launcher.plan.costs import run_costs, tokens_of
from parallel.config import ParallelConfig
from parallel.pipeline.config import SCHEDULES, Interleaved, OneFOneB, PipelineConfig

MOST_PP = 64
MOST_CP = 32
FEWEST_POSITIONS = 2048  # the least part of a sequence on a cp rank: with less, attention has too little to do
MOST_CHUNKS = 4
SAME = 1e-3  # relative difference below which two times count as equal
RECOMPUTE = MODES  # in this order the time of recomputation grows, and the memory of activations falls
# Switches that some layouts cannot have (launcher.config.layout_rules.with_switches).
SWITCHES = ("grad_reduce", "grad_reduce_dtype", "offload_optimizer", "tp_overlap", "ep_chunks")


@dataclass(frozen=True)
class Found:
    """One layout that fits, with its planned seconds a step and peak of memory."""

    config: RunConfig
    seconds: float
    peak_bytes: float


@dataclass
class Searched:
    """The best layouts for the config ``given``, the fastest first, and how many were planned and did not fit."""

    given: RunConfig
    best: list[Found]
    n_planned: int
    n_unfit: int


def search(config: RunConfig, n_gpus: int, gpu: Gpu, per_node: int, n_best: int = 10) -> Searched:
    """The ``n_best`` fastest layouts that the config's rules allow and whose memory fits; equal times go by memory."""
    fitting: list[Found] = []
    n_planned = n_unfit = 0
    factor = factors_of(config, gpu).memory
    for layout in layouts(config, n_gpus, per_node):
        for candidate in with_micro_batches(layout, n_gpus):
            n_planned += 1
            found = lightest_that_fits(candidate, n_gpus, gpu, per_node, factor)
            if found is None:
                n_unfit += 1
            else:
                fitting.append(found)
    fitting.sort(key=lambda each: (float(f"{each.seconds:.4g}"), each.peak_bytes))
    best: list[Found] = []
    for each in fitting:
        if not check(each.config, n_gpus):
            best.append(each)
            if len(best) == n_best:
                break
    return Searched(config, best, n_planned, n_unfit)


def layouts(config: RunConfig, n_gpus: int, per_node: int) -> Iterator[RunConfig]:
    """Every legal combination of degrees, ZeRO's stage and a schedule, with micro-batches of one sequence."""
    moe, train = config.model.moe, dataclasses.replace(config.train, micro_batch_size=1)
    eps = divisors(moe.n_experts, n_gpus) if moe is not None else [1]
    longest_cp = max(1, min(MOST_CP, config.data.seq_len // FEWEST_POSITIONS))
    for tp in divisors(n_gpus, per_node):
        for pp in divisors(n_gpus // tp, min(MOST_PP, config.model.n_layers)):
            for cp in divisors(n_gpus // (tp * pp), longest_cp):
                for ep in eps:
                    degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero": 1, "pipeline": OneFOneB()}
                    layout = with_switches(dataclasses.replace(config.parallel, **degrees), config.parallel, moe)
                    first = dataclasses.replace(config, parallel=layout, train=train)
                    if n_gpus // pp % ep or problems(first, n_gpus):
                        continue
                    yield from variants(first, config.parallel, n_gpus)


def variants(config: RunConfig, asked: ParallelConfig, n_gpus: int) -> Iterator[RunConfig]:
    """A legal layout with each ZeRO stage and pipeline schedule that is legal for it, and ``asked``'s switches."""
    alone = n_gpus == config.parallel.tp * config.parallel.pp
    stages = (1,) if alone else (1, 2, 3)
    for zero in stages:
        for schedule in schedules(config):
            layout = dataclasses.replace(config.parallel, zero=zero, pipeline=schedule)
            found = dataclasses.replace(config, parallel=with_switches(layout, asked, config.model.moe))
            if not problems(found, n_gpus):
                yield found


def schedules(config: RunConfig) -> list[PipelineConfig]:
    """The schedules to try: all, interleaved ones with several numbers of chunks; a single one without a pipeline."""
    if config.parallel.pp == 1:
        return [OneFOneB()]
    most = min(MOST_CHUNKS, config.model.n_layers // config.parallel.pp)
    interleaved = [Interleaved(n_chunks=chunks) for chunks in range(2, most + 1)]
    return [each for one in SCHEDULES for each in (interleaved if isinstance(one, Interleaved) else [one])]


def problems(config: RunConfig, n_gpus: int) -> list[str]:
    """The rules of layouts and batches that the config breaks, one line each."""
    return [*check_layout(config, n_gpus), *check_batch(config, n_gpus)]


def with_micro_batches(config: RunConfig, n_gpus: int) -> Iterator[RunConfig]:
    """The layout with micro-batches of 1, 2, 4, ... sequences, as long as they divide a rank's batch."""
    parallel, size = config.parallel, 1
    share = config.train.global_batch_size // (n_gpus // (parallel.tp * parallel.pp * parallel.cp))
    while share % size == 0:
        found = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=size))
        if size == 1 or not problems(found, n_gpus):
            yield found
        size *= 2


def lightest_that_fits(config: RunConfig, n_gpus: int, gpu: Gpu, per_node: int, factor: float = 1.0) -> Found | None:
    """The layout with the least recomputation with which its memory, times ``factor``, fits; None where none does.

    With a budget of activation memory (``train.activation_gib``), recomputation follows from the budget instead.
    """
    for recompute in RECOMPUTE if config.train.activation_gib is None else (config.train.recompute,):
        changed = dataclasses.replace(config, train=dataclasses.replace(config.train, recompute=recompute))
        job = job_of_config(changed, n_gpus, gpu, per_node)
        peak = memory_of(job).peak(fitted().memory) * factor
        if peak <= capacity(gpu):
            return Found(changed, sum(seconds_by_part(job, gpu).values()), peak)
    return None


def divisors(number: int, most: int) -> list[int]:
    """The divisors up to ``most``."""
    return [each for each in range(1, min(number, most) + 1) if number % each == 0]


def searched_json(
    found: Searched,
    n_gpus: int,
    gpu: Gpu,
    per_node: int,
    price: float | None = None,
    traces: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """The search as JSON: the layouts with their plans, and why the first is before the second.

    ``price`` is that of a GPU-hour. ``traces`` holds for each layout, in the same order, the fields that
    ``launcher.plan.decide.verdict_json`` makes of its trace; None where nothing was traced.
    """
    rows, factors = [], factors_of(found.best[0].config, gpu)
    for number, each in enumerate(found.best):
        plan = plan_on(job_of_config(each.config, n_gpus, gpu, per_node), gpu)
        figures = scaled({key: plan[key] for key in plan if key != "reason"}, factors)
        speed = figures["tokens_per_second_per_gpu"] * n_gpus
        costs = run_costs(tokens_of(each.config), speed, n_gpus, gpu.hardware.watts, price)
        trace = traces[number] if traces is not None else {"trace": None, "not_traced": "--traces=0"}
        rows.append({"overrides": overrides_of(each.config, found.given), **figures, **costs, **trace})
    return {
        "gpus": n_gpus,
        "gpu": gpu.hardware.name,
        "planned": found.n_planned,
        "did_not_fit": found.n_unfit,
        "tokens": tokens_of(found.best[0].config),
        "layouts": rows,
        "corrected_by": list(factors.origins),
        "why": reason_of_order(rows[0], rows[1]) if len(rows) > 1 else None,
    }


def factors_of(config: RunConfig, gpu: Gpu) -> Factors:
    """The corrections of plans by closed forms that measured runs on this hardware give."""
    return factors_for(gpu.hardware.name, "dense" if config.model.moe is None else "MoE", "closed_forms")


def scaled(plan: dict[str, Any], factors: Factors) -> dict[str, Any]:
    """A plan by closed forms with its time and memory corrected. The search has used the same correction of memory."""
    times = {key: plan[key] * factors.step for key in ("step_seconds", "step_seconds_low", "step_seconds_high")}
    parts = {name: seconds * factors.step for name, seconds in plan["seconds_by_part"].items()}
    held = {key: plan[key] * factors.memory for key in ("peak_gb", "peak_gb_low", "peak_gb_high")}
    speed = {"tokens_per_second_per_gpu": plan["tokens_per_second_per_gpu"] / factors.step}
    return {**plan, **times, **held, **speed, "seconds_by_part": parts}


def overrides_of(config: RunConfig, given: RunConfig) -> list[str]:
    """The overrides of the command line that turn the layout of ``given`` into that of ``config``."""
    parallel, train = config.parallel, config.train
    found = [f"parallel.{name}={getattr(parallel, name)}" for name in ("tp", "pp", "cp", "ep", "zero")]
    if parallel.pp > 1:
        found.append(f"parallel.pipeline.name={parallel.pipeline.name}")
        if isinstance(parallel.pipeline, Interleaved):
            found.append(f"parallel.pipeline.n_chunks={parallel.pipeline.n_chunks}")
    if given.parallel.pipeline.layers is not None:
        found.append("parallel.pipeline.layers=null")
    before = given.parallel
    switched = [name for name in SWITCHES if getattr(parallel, name) != getattr(before, name)]
    found += [f"parallel.{name}={str(getattr(parallel, name)).lower()}" for name in switched]
    if train.activation_gib is not None:
        found.append(f"train.activation_gib={train.activation_gib:g}")
    return [*found, f"train.micro_batch_size={train.micro_batch_size}", f"train.recompute={train.recompute}"]


def reason_of_order(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Why the first layout is before the second, in words: by their traces where both have one, or by closed forms."""
    if first["trace"] is not None and second["trace"] is not None and second["trace"]["fits"]:
        return f"by their traces {why(first['trace'], second['trace'])}"
    if first["trace"] is None and second["trace"] is None:
        return why(first, second)
    if second["trace"] is not None and not second["trace"]["fits"]:
        return f"the second does not fit by its trace: {second['trace']['peak_gb']:.1f} GiB"
    return f"by closed forms {why(first, second)}"


def why(first: dict[str, Any], second: dict[str, Any]) -> str:
    """The parts of a step on which the first layout spends less time than the second, and more, in words."""
    one, other = first["seconds_by_part"], second["seconds_by_part"]
    gained = second["step_seconds"] - first["step_seconds"]
    if gained < SAME * first["step_seconds"]:
        held = second["peak_gb"] - first["peak_gb"]
        return "the first takes as long as the second" + (f", and {held:.1f} GiB less memory" if held > 0 else "")
    gains = {part: other.get(part, 0.0) - one.get(part, 0.0) for part in {**one, **other}}
    less = [part for part in sorted(gains, key=lambda part: -gains[part]) if gains[part] > SAME * gained][:2]
    more = [part for part in sorted(gains, key=lambda part: gains[part]) if gains[part] < -SAME * gained][:1]
    words = f"the first takes {gained:.3f} s less of a step than the second: less {told(less, gains)}"
    return f"{words}, but more {told(more, gains)}" if more else words


def told(parts: Sequence[str], gains: dict[str, float]) -> str:
    """Parts with their differences in seconds, in words."""
    return " and ".join(f"{part} ({abs(gains[part]):.3f} s)" for part in parts)
