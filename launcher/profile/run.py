"""Profiles the training step that `train` would run, on all ranks together."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from data.dataset import Dataset
from launcher.config.tree import RunConfig
from launcher.profile.rates import measure_rates
from launcher.profile.spans import Times, seconds_by_part, spans_of, steps_of
from launcher.profile.tokens import open_tokens
from launcher.profile.trace_file import write_trace
from launcher.profile.twins import WatchedDataset, WatchedEngine
from launcher.trace.kept import sort_kept
from launcher.trace.parts import Axes
from launcher.trace.recorder import Memory, Recorder
from launcher.trace.regions import Regions
from launcher.trace.roofline import Rates, Sum, sums_by
from launcher.training.loop import build_engine, prepare_process, run_step
from launcher.training.state import TrainState
from launcher.watch.speed import peak_memory_gib
from modeling.dtypes import DTYPES
from parallel.mesh import Mesh, opened_mesh, wait_for_all


@dataclass
class RankProfile:
    """One rank's measurements, as means over steps where not stated otherwise."""

    rank: int
    place: str  # its position on the axes, in words
    device: str
    plain_seconds: list[float]  # of each step without the profiler
    seconds: float  # of a step under the profiler; its parts add up to it
    times: Times
    sums: dict[tuple[str, str], Sum]
    rates: Rates
    memory: Memory
    peak_gib: float  # the peak of memory as `train` counts it
    tokens: int  # of the whole batch
    own_tokens: bool  # whether the tokens are the config's own, not random ones


@dataclass(frozen=True)
class Plan:
    """The numbers of steps to run, and the folder for traces."""

    out: Path
    warmup: int
    steps: int


def profile_rank(config: RunConfig, plan: Plan, tell: Callable[[str], None]) -> RankProfile:
    """This rank's profile, on its own device. All ranks call it; writes its trace into ``plan.out``."""
    prepare_process(config)
    with opened_mesh(config.parallel, config.train.timeout_seconds) as mesh:
        return profiled(config, plan, mesh, tell)


def profile_job(config: RunConfig, plan: Plan, tell: Callable[[str], None]) -> list[RankProfile]:
    """All ranks' profiles on rank 0, an empty list on the others. All ranks call it; each writes its trace."""
    prepare_process(config)
    with opened_mesh(config.parallel, config.train.timeout_seconds) as mesh:
        mine = profiled(config, plan, mesh, tell)
        found: list[Any] | None = [None] * mesh.world_size if mesh.rank == 0 else None
        dist.gather_object(mine, found, dst=0, group=mesh.control)
        return found or []


def profiled(config: RunConfig, plan: Plan, mesh: Mesh, tell_all: Callable[[str], None]) -> RankProfile:
    """This rank's profile on ``mesh``; rank 0 reports progress by ``tell_all``. All ranks call it."""
    tell = tell_all if mesh.rank == 0 else lambda line: None
    tell("building the model, its weights as at step 0")
    engine = build_engine(config, mesh, engine_class=WatchedEngine)
    assert isinstance(engine, WatchedEngine)
    engine.initialize_weights(config.seed)
    n_samples = config.train.global_batch_size * (plan.warmup + 2 * plan.steps + 1)
    dataset, own_tokens = open_tokens(config, n_samples)
    state = TrainState()
    tell(f"{plan.warmup} steps to warm up, and {plan.steps} timed")
    run_steps(config, engine, dataset, state, plan.warmup)
    tokens_before, plain = state.tokens, run_steps(config, engine, dataset, state, plan.steps)
    tokens = (state.tokens - tokens_before) // plan.steps
    peak_gib = peak_memory_gib(mesh.device)
    tell(f"{plan.steps} steps under torch.profiler")
    profiler, regions = traced_steps(config, engine, dataset, state, plan.steps)
    spans = spans_of(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
    whole = sum(step.end - step.begin for step in steps_of(spans)) / 1e9
    times = seconds_by_part(spans, regions.stretches, axes_of(engine))
    write_trace(profiler, plan.out, mesh)
    tell("one step operation by operation, for FLOPs, bytes and memory")
    recorder = recorded_step(config, engine, dataset, state)
    tell("the rates of this machine")
    dtypes = {op.work.dtype for op in recorder.ops if op.work.flops and op.work.dtype is not None}
    rates = measure_rates(mesh, dtypes | {DTYPES[config.train.stored]})
    return RankProfile(
        rank=mesh.rank,
        place=mesh.place,
        device=rates.name,
        plain_seconds=plain,
        seconds=whole / plan.steps,
        times={key: seconds / plan.steps for key, seconds in times.items()},
        sums=sums_by(((op, 1) for op in recorder.ops), rates),
        rates=rates,
        memory=recorder.finish(),
        peak_gib=peak_gib,
        tokens=tokens,
        own_tokens=own_tokens,
    )


def run_steps(
    config: RunConfig, engine: WatchedEngine, dataset: Dataset, state: TrainState, n_steps: int
) -> list[float]:
    """Runs ``n_steps`` steps, which all ranks begin together, and returns the seconds of each."""
    seconds = []
    for _ in range(n_steps):
        wait_for_all(engine.mesh)
        began = time.perf_counter()
        run_step(config, engine, dataset, state)
        if engine.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


def axes_of(engine: WatchedEngine) -> Axes:
    """The facts about the engine's layout by which communication is attributed to an axis."""
    return Axes(has_tp=engine.mesh.tp.degree > 1, gathers_weights=engine.needs_equal_graphs)


@contextlib.contextmanager
def watched(engine: WatchedEngine, regions: Regions) -> Iterator[None]:
    """Marks the engine's functions and its model's modules as regions in ``regions`` while the context lasts."""
    former, engine.regions = engine.regions, regions
    try:
        with regions.of(engine.model):
            yield
    finally:
        engine.regions = former


def traced_steps(
    config: RunConfig, engine: WatchedEngine, dataset: Dataset, state: TrainState, n_steps: int
) -> tuple[Any, Regions]:
    """Runs ``n_steps`` steps under torch's profiler; returns it and the regions that the steps went through."""
    regions = Regions(marks=True)
    activities = [ProfilerActivity.CPU]
    if engine.mesh.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with watched(engine, regions), profile(activities=activities) as profiler:
        seen = WatchedDataset(dataset, regions)
        for _ in range(n_steps):
            wait_for_all(engine.mesh)
            with regions.within("bookkeeping"):
                run_step(config, engine, seen, state)
                if engine.mesh.device.type == "cuda":
                    torch.cuda.synchronize()
    return profiler, regions


def recorded_step(config: RunConfig, engine: WatchedEngine, dataset: Dataset, state: TrainState) -> Recorder:
    """Runs one step under a Recorder, which is returned with the step's operations and its tensors' memory."""
    regions = Regions()
    states = [value for each in engine.base.state.values() for value in each.values()]
    held = {
        "weights": [*engine.model.parameters(), *engine.products.kept()],
        "masters": [weight for group in engine.base.param_groups for weight in group["params"]],
        "optimizer state": [value for value in states if isinstance(value, torch.Tensor)],
    }
    with watched(engine, regions), regions.within("bookkeeping"):
        recorder = Recorder(regions, axes_of(engine), held=held)
        sort_kept(engine.products, recorder.sort)
        with recorder:
            run_step(config, engine, WatchedDataset(dataset, regions), state)
    return recorder
