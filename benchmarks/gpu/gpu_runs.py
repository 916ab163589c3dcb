"""Runs of the real loop for the parts: token files, configs, and what one rank measures. Small in a dry run."""

import dataclasses
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpu_device
from data.config import DataConfig, SourceConfig
from data.dataset import open_dataset
from data.order import take
from data.tokenwriter import TokenFileWriter
from gpu_part import Place
from gpu_report import ROOT
from gpu_turn import turn
from launcher.config.load import load_config
from launcher.config.tree import RunConfig, TrainConfig
from launcher.training.loop import build_engine, prepare_process, run_step
from launcher.training.state import TrainState
from launcher.training.step import accumulate_gradients
from launcher.watch.speed import peak_flops_per_second
from modeling.config import ModelConfig
from modeling.counts import flops_per_token
from modeling.optimizers.config import AdamWConfig
from modeling.schedules import ConstantSchedule
from parallel.config import ParallelConfig
from parallel.mesh import close_mesh, open_mesh
from parallel.processes.start import run_ranks
from parallel.processes.stop import StopRequest
from parallel.sizes import DEFAULT_SIZES, Sizes
from parallel.zero.engine import Engine

SMALL_CARD_GIB = 100  # below, fewer layers fit: an H100 has 80 GB
# name -> (file, layers on a large card, on a small one)
MODELS = {
    "Llama 3 8B": ("configs/models/llama-3-8b.yaml", 16, 9),
    "Qwen3-30B-A3B": ("configs/models/qwen3-30b-a3b.yaml", 6, 4),
}
NO_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Job:
    """What one rank is to measure."""

    config: RunConfig
    dry: bool
    steps: int = 5
    sizes: Sizes = DEFAULT_SIZES
    kernels: int = 0  # so many of the profiler's top are told of
    trace: Path | None = None  # where the profiler's trace goes


def command(*arguments: str, timeout: float, environment: dict[str, str] | None = None) -> str:
    """What `roundtable` with these arguments prints; raises RuntimeError with its last words where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env=environment or plain_environment(),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"roundtable {' '.join(arguments)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def plain_environment() -> dict[str, str]:
    """This process's variables, without those of a job that it may be in."""
    return {name: value for name, value in os.environ.items() if name not in NO_RANK}


def write_random_tokens(folder: Path, vocab_size: int, n_tokens: int, document: int) -> str:
    """Token files of random documents of equal length; returns their prefix."""
    random = np.random.default_rng(0)
    prefix = folder / "random"
    writer = TokenFileWriter(prefix, np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32))
    for _ in range(max(2, n_tokens // document)):
        writer.add(random.integers(1, vocab_size, size=document))
    writer.finish()
    return str(prefix)


def published(name: str, place: Place) -> ModelConfig:
    """Some layers of a published model, as many as fit; in a dry run two of small ones."""
    path, large, small = MODELS[name]
    model = load_config(ROOT / path).model
    if place.dry:
        moe = None if model.moe is None else dataclasses.replace(model.moe, n_experts=8, top_k=2, d_ff=32)
        widths = {"vocab_size": 512, "d_model": 64, "d_head": 16, "n_heads": 4, "n_kv_heads": 2, "d_ff": 96}
        return dataclasses.replace(model, n_layers=2, moe=moe, **widths)
    gib = gpu_device.hardware(place.device)["gib"]
    return dataclasses.replace(model, n_layers=small if gib < SMALL_CARD_GIB else large)


def baseline(
    name: str,
    place: Place,
    parallel: ParallelConfig = ParallelConfig(zero=1),  # noqa: B008 it is frozen
    document: int | None = None,
    **train: Any,
) -> RunConfig:
    """A run of random tokens with that model: 8,192 tokens a micro-batch, eight of them a step, bf16, ZeRO 1.

    ``document``: the tokens of each document; None: sequences are cut out of longer ones. ``train``: its other keys.
    """
    model, seq_len = published(name, place), place.small(8192, 64)
    tokens = write_random_tokens(place.folder, model.vocab_size, 64 * seq_len, document or 3 * seq_len)
    settings = {"steps": 1000, "global_batch_size": 8, "micro_batch_size": 1, "precision": "bf16", **train}
    return RunConfig(
        run_dir=str(place.folder / "run"),
        model=model,
        data=DataConfig(seq_len=seq_len, sources=(SourceConfig(path=tokens),)),
        train=TrainConfig(**settings),
        optimizer=AdamWConfig(lr=1e-5),
        schedule=ConstantSchedule(),
        parallel=parallel,
    )


def measured(job: Job, timeout_seconds: float) -> dict[str, Any]:
    """What a rank in a process of its own measures."""
    return run_ranks(measure_rank, 1, job, timeout_seconds=timeout_seconds)[0]


def measure_rank(job: Job) -> dict[str, Any]:
    """In a rank: the times of steps and of one micro-batch, tokens/s, MFU, peak memory, the host's waits, kernels."""
    config = job.config
    prepare_process(config)
    mesh = open_mesh(config.parallel, 600)
    device = mesh.device
    engine = build_engine(config, mesh, job.sizes)
    draw_on_device(engine, config.model.init_std)
    dataset = open_dataset(config.data, seed=0, vocab_size=config.model.vocab_size, split="train")
    state = TrainState()

    def step() -> dict[str, Any]:
        return run_step(config, engine, dataset, state).row

    rows = [step() for _ in range(2)]
    gpu_device.forget(device)
    with turn():
        rows = [step() for _ in range(job.steps)]
        found = figures_of(rows, config, device)
        found["micro_batch_ms"] = 1000 * micro_batch_seconds(config, engine, dataset, device)
    with gpu_device.counting_waits(device) as waits:
        step()
    found["waits"] = len(waits)
    found["waited_at"] = {place: waits.count(place) for place in sorted({*waits})}
    if job.kernels:
        found |= dataclasses.asdict(gpu_device.profiled(step, device, job.kernels, job.trace))
    close_mesh()
    return found


def figures_of(rows: Sequence[dict[str, Any]], config: RunConfig, device: torch.device) -> dict[str, Any]:
    """Of the steps' rows: the median time and what follows from it."""
    seconds = statistics.median(row["step_seconds"] for row in rows)
    tokens = config.train.global_batch_size * config.data.seq_len
    peak = peak_flops_per_second(device, config.train.stored)
    flops = flops_per_token(config.model, config.data.seq_len) * tokens / seconds
    assert all(np.isfinite(row["loss"]) for row in rows), [row["loss"] for row in rows]
    return {
        "step_ms": 1000 * seconds,
        "tokens_per_second": tokens / seconds,
        "mfu": None if peak is None else 100 * flops / peak,
        "peak_gib": gpu_device.peak_gib(device),
    }


def micro_batch_seconds(config: RunConfig, engine: Engine, dataset: Any, device: torch.device) -> float:
    """The median time of one micro-batch's forward and backward passes; their gradients are dropped."""
    samples = take(0, config.train.micro_batch_size)

    def once() -> None:
        accumulate_gradients(engine, dataset, samples, config.train.micro_batch_size, StopRequest(), (0, 1))

    found = []
    for _ in range(4):
        gpu_device.synchronize(device)
        started = time.perf_counter()
        once()
        gpu_device.synchronize(device)
        found.append(time.perf_counter() - started)
        engine.discard()
    return statistics.median(found[1:])


@torch.no_grad()
def draw_on_device(engine: Engine, deviation: float) -> None:
    """First weights for measurements: drawn where they lie, which billions of them are not on a host in a minute."""
    engine.reset_states(0)
    for fragment in engine.fragments:
        weight = engine.pieces(fragment)["weight"]
        if fragment.weight.init in ("ones", "zeros"):
            weight.fill_(float(fragment.weight.init == "ones"))
        else:
            weight.normal_(0.0, deviation)
    for buffer in engine.model.buffers():
        buffer.zero_()
    engine.publish_weights()


def collect(device: torch.device) -> None:
    """Frees what only cycles hold."""
    gc.collect()
    gpu_device.forget(device)
