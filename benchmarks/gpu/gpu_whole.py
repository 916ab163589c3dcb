"""Part 2: whole runs by the commands that a user types, and what only a GPU's memory shows."""

import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpu_device
from command_runs import rank_pids
from data.config import DataConfig, SourceConfig
from data.dataset import open_dataset
from data.order import take
from gpu_part import Check, Place
from gpu_report import ROOT
from gpu_runs import command, draw_on_device, plain_environment, write_random_tokens
from launcher.config.dump import dump_config
from launcher.config.tree import CheckpointConfig, MetricsConfig, RunConfig, TrainConfig, WandbConfig
from launcher.prove.reference import PlainBatch, ReferenceTrainer
from launcher.training.loop import build_engine, prepare_process, run_step
from launcher.training.state import TrainState
from launcher.watch.metrics import read_metrics
from layout_runs import DENSE_MODEL, MOE_MODEL
from modeling.config import ModelConfig
from modeling.moe_config import MoEConfig
from modeling.optimizers.config import AdamWConfig, SGDConfig
from modeling.schedules import ConstantSchedule
from parallel.config import ParallelConfig
from parallel.mesh import close_mesh, open_mesh
from parallel.processes.start import run_ranks
from parallel.zero.engine import Engine
from parallel.zero.fragments import Fragment

QUICKSTART = "configs/quickstart.yaml"
DRY_QUICKSTART = (
    'data.sources=[{path: "docs/*.md"}]',
    "data.seq_len=64",
    "model.vocab_size=600",
    "model.d_model=32",
    "model.d_head=16",
    "model.n_heads=2",
    "model.n_kv_heads=2",
    "model.n_layers=2",
    "model.moe.d_ff=32",
    "train.steps=4",
    "train.precision=fp32",
    "train.eval_every_steps=4",
    "train.eval_sequences=4",
    "schedule.warmup_steps=1",
    "checkpoint.every_steps=2",
)
LARGE = 2**31  # elements that 32 bits do not count
LOSS_BOUNDS = {"fp32": 1e-5, "bf16": 1e-3}  # relative, over the steps
NORM_BOUNDS = {"fp32": 1e-4, "bf16": 1e-2}
# Widths that grouped products take in 16 bits.
EVEN_MOE = dataclasses.replace(
    MOE_MODEL, d_model=64, d_ff=64, moe=dataclasses.replace(MOE_MODEL.moe or MoEConfig(), d_ff=32)
)
EVEN_DENSE = dataclasses.replace(DENSE_MODEL, d_model=64, d_ff=64)


def checks(n_devices: int, *, dry: bool) -> list[Check]:
    """The part's checks."""
    found = [Check("quickstart: train, export, generate", check_quickstart, 240)]
    found += [Check("quickstart: torchrun", check_torchrun, 120)]
    layouts = [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16"), (1, "fp32")]
    for zero, precision in layouts[:2] if dry else layouts:
        for kind in ("moe",) if dry and zero else ("dense", "moe"):
            name = f"ZeRO {zero} {precision} {kind} against the plain trainer"
            found.append(Check(name, partial(check_zero, zero, precision, kind), 60))
    found += [Check("kill -9 and resume, bitwise", check_resume, 150)]
    found += [Check("memory stays over 60 steps", check_memory, 90)]
    return [*found, Check("a flat partition above 2^31 elements", check_large, 120)]


def overrides(place: Place, *more: str) -> list[str]:
    """Those of the quickstart here. Its checks share the token files."""
    where = [f"run_dir={place.folder / 'run'}", f"data.token_dir={place.folder.parent / 'quickstart-tokens'}"]
    return [*where, "metrics.wandb.mode=disabled", *(DRY_QUICKSTART if place.dry else ()), *more]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The updates of a run."""
    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def check_quickstart(place: Place) -> None:
    """The loss falls, the export loads in transformers and continues a prompt, as our own command does."""
    run, exported = place.folder / "run", place.folder / "export"
    started = time.perf_counter()
    command("train", QUICKSTART, "--ranks", "1", *overrides(place), timeout=place.seconds(230))
    place.figure("seconds", time.perf_counter() - started, "s, preparing the text included")
    rows = rows_of(run)
    place.figure("tokens_per_second", statistics.median(row["tokens_per_second"] for row in rows), "tokens/s")
    evaluated = [row["eval_loss"] for row in read_metrics(run / "metrics.jsonl") if "eval_loss" in row]
    place.figure("eval_loss", evaluated[-1], "held-out loss")
    assert rows[-1]["loss"] < rows[0]["loss"] - place.small(3.0, 0.0), (rows[0]["loss"], rows[-1]["loss"])
    command("export", str(run), str(exported), timeout=place.seconds(120))
    complete(exported, place.device)
    assert command(
        "generate", str(run), "--prompt", "import os", "--max-new-tokens", "8", timeout=place.seconds(120)
    ).strip()


def complete(exported: Path, device: torch.device) -> None:
    """transformers' own class loads the export on the device and continues a prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exported, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=False).to(device)
    inputs = {name: value.to(device) for name, value in tokenizer("import os", return_tensors="pt").items()}
    n_prompt = inputs["input_ids"].shape[1]
    tokens_BS = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert tokens_BS.shape[1] > n_prompt


def check_torchrun(place: Place) -> None:
    """The same by torchrun, ten steps: the first loss is that of one more start."""
    shorter = (f"train.steps={place.small(10, 2)}", "schedule.warmup_steps=1", "train.eval_every_steps=null")
    more = overrides(place, *shorter)
    command("prepare", QUICKSTART, *more, timeout=place.seconds(110))
    started = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "launcher", "train"]
    done = subprocess.run(
        [sys.executable, *started, QUICKSTART, *more],
        capture_output=True,
        text=True,
        timeout=place.seconds(110),
        cwd=ROOT,
        env=plain_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [row["loss"] for row in rows_of(place.folder / "run")]
    assert len(losses) == place.small(10, 2) and all(map(math.isfinite, losses)), losses
    vocab_size = place.small(8192, 600)
    assert abs(losses[0] - math.log(vocab_size)) < 1, f"the first loss is {losses[0]}, of {vocab_size} tokens"


def small_run(place: Place, model: ModelConfig, precision: str, zero: int, **changes: Any) -> RunConfig:
    """A small run of random tokens."""
    tokens = write_random_tokens(place.folder, model.vocab_size, 20_000, 29)
    settings = {
        "steps": place.small(5, 2),
        "global_batch_size": place.small(8, 4),
        "micro_batch_size": 2,
        "precision": precision,
    }
    return RunConfig(
        name="run",
        run_dir=str(place.folder / "run"),
        model=model,
        data=DataConfig(seq_len=place.small(48, 24), sources=(SourceConfig(path=tokens),), heldout_path=tokens),
        train=TrainConfig(**{**settings, **changes}),  # type: ignore[arg-type]
        optimizer=SGDConfig(lr=0.5, momentum=0.9, clip_norm=0.5),
        schedule=ConstantSchedule(),
        parallel=ParallelConfig(zero=zero),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )


def check_zero(zero: int, precision: str, kind: str, place: Place) -> None:
    """Losses and norms of five steps are those of the plain trainer on the same device."""
    config = small_run(place, EVEN_MOE if kind == "moe" else EVEN_DENSE, precision, zero)
    ours = run_ranks(train_rank, 1, config, timeout_seconds=place.seconds(55))[0]
    theirs = plain_rows(config, place.device)
    for bounds, key in ((LOSS_BOUNDS, "loss"), (NORM_BOUNDS, "grad_norm")):
        errors = [abs(mine[key] / other[key] - 1) for mine, other in zip(ours, theirs, strict=True)]
        assert max(errors) <= bounds[precision], f"{key}: relative errors by step {errors}, bound {bounds[precision]}"


def train_rank(config: RunConfig) -> list[dict[str, Any]]:
    """In a rank: the steps' rows."""
    prepare_process(config)
    mesh = open_mesh(config.parallel, 50)
    engine = build_engine(config, mesh)
    engine.initialize_weights(config.seed)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    state = TrainState()
    rows = [run_step(config, engine, dataset, state).row for _ in range(config.train.steps)]
    close_mesh()
    return rows


def plain_rows(config: RunConfig, device: torch.device) -> list[dict[str, Any]]:
    """The same steps by one plain trainer, whose weights and batches lie on the device."""
    trainer = ReferenceTrainer(config.model, config.optimizer, seed=config.seed, precision=config.train.precision)
    trainer.model.to(device)
    for master in trainer.masters.values():
        master.data = master.data.to(device)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    rows = []
    for step in range(config.train.steps):
        indices = take(step * config.train.global_batch_size, config.train.global_batch_size)
        parts = np.split(indices, len(indices) // config.train.micro_batch_size)
        seen = trainer.step([plain_batch(dataset, part, device) for part in parts], config.optimizer.lr)
        rows.append({"loss": seen.loss, "grad_norm": seen.grad_norm})
    return rows


def plain_batch(dataset: Any, samples: np.ndarray, device: torch.device) -> PlainBatch:
    """Some samples on the device."""
    batch = dataset.read(samples)
    arrays = (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS)
    return PlainBatch(*(torch.from_numpy(array).to(device) for array in arrays))


def check_resume(place: Place) -> None:
    """A run whose rank is killed between asynchronous saves, and goes on: the rows of one that was not, bit for bit."""
    steps = place.small(40, 6)
    config = small_run(place, EVEN_MOE, place.small("bf16", "fp32"), 1, steps=steps, deterministic=True)
    config = dataclasses.replace(
        config, optimizer=AdamWConfig(lr=1e-3), checkpoint=CheckpointConfig(every_steps=place.small(4, 2))
    )
    paths = []
    for name in ("whole", "killed"):
        own = dataclasses.replace(config, name=name, run_dir=str(place.folder / name))
        paths.append(place.folder / f"{name}.yaml")
        paths[-1].write_text(dump_config(own))
    whole, killed = paths
    command("train", str(whole), "--ranks", "1", timeout=place.seconds(60))
    kill_after(killed, steps // 2, place.seconds(60))
    command("train", str(killed), "--ranks", "1", timeout=place.seconds(60))
    sides = [[(row["step"], row["loss"], row["grad_norm"]) for row in rows_of(path.with_suffix(""))] for path in paths]
    assert len(sides[0]) == steps
    assert sides[0] == sides[1], (
        f"first difference: {next(pair for pair in zip(*sides, strict=False) if len({*pair}) > 1)}"
    )


def kill_after(path: Path, step: int, most_seconds: float) -> None:
    """Starts the run, and kills its rank once that step is done."""
    arguments = [sys.executable, "-m", "launcher", "train", str(path), "--ranks", "1"]
    with subprocess.Popen(arguments, cwd=ROOT, env=plain_environment(), stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + most_seconds
        while not step_is_done(path.with_suffix("") / "metrics.jsonl", step):
            assert process.poll() is None, "the run ended before it was killed"
            assert time.monotonic() < deadline, f"step {step} was not reached within {most_seconds} s"
            time.sleep(0.01)
        for pid in rank_pids(process.pid):
            os.kill(pid, signal.SIGKILL)
        code = process.wait(most_seconds)
    assert code != 0, "the run ended well, though its rank was killed"


def step_is_done(path: Path, step: int) -> bool:
    """Whether the file has that step's row; the last line may be half written."""
    lines = path.read_text().splitlines()[:-1] if path.exists() else []
    return any(json.loads(line).get("step", 0) >= step for line in lines)


def check_memory(place: Place) -> None:
    """What tensors hold after a step is the same from step 20 to step 60, though the collector never runs."""
    early, late = place.small((20, 60), (4, 8))
    config = small_run(place, EVEN_MOE, place.small("bf16", "fp32"), 1, steps=late)
    held = run_ranks(memory_rank, 1, config, timeout_seconds=place.seconds(85))[0]
    place.figure("held early", held[early - 1] / 2**20, "MiB")
    place.figure("held late", held[late - 1] / 2**20, "MiB")
    grown = held[late - 1] - held[early - 1]
    allowed = 0 if place.device.type == "cuda" else 64 * 2**20  # a CPU's heap is not as exact
    assert grown <= allowed, f"{grown} bytes more after step {late} than after step {early}"


def memory_rank(config: RunConfig) -> list[int]:
    """In a rank: the bytes held after each step."""
    prepare_process(config)
    mesh = open_mesh(config.parallel, 80)
    engine = build_engine(config, mesh)
    engine.initialize_weights(config.seed)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    state, held = TrainState(), []
    for _ in range(config.train.steps):
        run_step(config, engine, dataset, state)
        held.append(gpu_device.held_bytes(mesh.device))
    close_mesh()
    return held


def check_large(place: Place) -> None:
    """The first AdamW update of the partition's first and last elements is what the formula says."""
    widths = {"d_model": 4096, "d_ff": 16384, "n_heads": 32, "n_kv_heads": 8, "n_layers": 5, "vocab_size": 128256}
    model = dataclasses.replace(DENSE_MODEL, **place.small(widths, {"n_layers": 1}))
    config = small_run(place, model, "bf16", 1)
    # One group of all matrices: with decay on the embedding, too, of which there is none.
    rule = AdamWConfig(lr=1e-3, weight_decay=0.0, decay_embeddings=True, clip_norm=None)
    config = dataclasses.replace(config, optimizer=rule)
    n_elements, errors = run_ranks(large_rank, 1, config, timeout_seconds=place.seconds(115))[0]
    place.figure("elements", n_elements, "in one flat partition")
    assert place.dry or n_elements > LARGE, n_elements
    assert max(errors) < 0.02, f"updates differ from the formula's by {errors} of the learning rate, first and last"


def large_rank(config: RunConfig) -> tuple[int, list[float]]:
    """In a rank: the largest partition's elements, and the largest errors of its first and last fragments' updates."""
    prepare_process(config)
    mesh = open_mesh(config.parallel, 110)
    engine = build_engine(config, mesh)
    draw_on_device(engine, config.model.init_std)
    dataset = open_dataset(config.data, seed=0, vocab_size=config.model.vocab_size, split="train")
    flat = max((fragment.flat for fragment in engine.fragments), key=lambda each: each.numel())
    inside = [each for each in engine.fragments if each.flat is flat]
    ends = [min(inside, key=lambda each: each.offset), max(inside, key=lambda each: each.offset)]
    before = [engine.pieces(each)["weight"].clone() for each in ends]
    run_step(config, engine, dataset, TrainState())
    errors = [error_of(engine, config, *pair) for pair in zip(ends, before, strict=True)]
    close_mesh()
    return flat.numel(), errors


def error_of(engine: Engine, config: RunConfig, fragment: Fragment, before: torch.Tensor) -> float:
    """By how much the update of the fragment's elements differs from AdamW's first, in learning rates.

    Of an embedding only the rows of the batch's tokens have a gradient, and move. The first update is the gradient over
    its magnitude, times the rate; the first moment tells the gradient.
    """
    rule, pieces = config.optimizer, engine.pieces(fragment)
    assert isinstance(rule, AdamWConfig)
    gradient = pieces["exp_avg"] / (1 - rule.beta1)
    wanted = -rule.lr * gradient / (gradient.abs() + rule.eps)
    moved = pieces["weight"] - before
    assert moved.any(), f"{fragment.name} did not move"
    return float((moved - wanted).abs().max()) / rule.lr
