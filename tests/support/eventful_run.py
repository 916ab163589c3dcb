"""A run with crashes, changes of layout and batch size, a skipped batch and a rollback, for tests of replays.

Its data has twelve token ids, so that samples of noise among them are loss spikes by themselves: a replay of its steps
meets them, too. Each start is made by the command itself. The steps of each start are known beforehand, and the draws
depend on them.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

import hang_job
import launcher.training.start as start
from command_runs import BIAS_MODEL, write_config
from data.dataset import open_dataset
from data_reference import write_token_file
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import CheckpointConfig, HealthConfig, RunConfig
from layout_runs import VOCAB_SIZE
from modeling.mtp_config import MTPConfig
from modeling.optimizers.config import AdamWConfig
from random_layouts import draw_parallel

SEED, N_DRAWN, N_STEPS = 1, 20, 34
EVERY_STEPS = 3  # between checkpoints
N_WINDOWS, LEARNT = 340, 12
# A model that fits a pipeline with two stages a rank, with multi-token prediction.
MODEL = dataclasses.replace(BIAS_MODEL, family="none", n_layers=4, tie_embeddings=False, mtp=MTPConfig())
NOISE = (*range(128, 134), *range(208, 214))  # samples of step 17, which is skipped, and of step 26, which is undone


@dataclass(frozen=True)
class Life:
    """One start by the command, with the restarts that follow it by --max-restarts."""

    ranks: int
    overrides: tuple[str, ...]
    last: int  # the last step whose final record is of this start
    size: int  # sequences in its batches, once they have grown
    killed_before: int | None = None  # the step before which its first rank is killed
    restarts: int = 0
    code: int = 0


LIVES = (
    Life(
        2,
        (
            *("parallel.ep=2", "parallel.zero=1", "train.global_batch_size=8"),
            "train.batch_ramp={start: 4, increment: 4, samples: 16}",
            "train.steps=12",
        ),
        last=12,
        size=8,
        killed_before=9,
        restarts=1,
    ),
    Life(
        2,
        ("parallel.tp=2", "train.global_batch_size=12", "health.on_spike=skip", "train.steps=30", "optimizer.lr=0.004"),
        last=18,
        size=12,
        killed_before=21,
        code=1,
    ),
    Life(
        2,
        ("parallel.pp=2", "parallel.pipeline.name=interleaved", "health.on_spike=rollback", "train.steps=30"),
        last=30,
        size=8,
    ),
    Life(
        4,
        ("parallel.pp=2", "parallel.pipeline.name=zbv", "parallel.cp=2", "parallel.zero=1", "train.steps=40"),
        last=33,
        size=8,
        killed_before=36,
        code=1,
    ),
    Life(
        4,
        ("parallel.cp=2", "parallel.ep=2", "parallel.zero=3", "train.global_batch_size=12", f"train.steps={N_STEPS}"),
        last=34,
        size=12,
    ),
)


def life_of(step: int) -> Life:
    """The start that made the step as it is finally recorded."""
    return next(life for life in LIVES if step <= life.last)


def size_of(step: int) -> int:
    """The sequences in the step's batch; the first four steps are on the batch ramp."""
    return 4 if step <= 4 else life_of(step).size


def write_run(folder: Path) -> Path:
    """Writes the run's config file and token file; returns the config's path.

    Each window of 24 tokens holds two whole documents; the samples NOISE hold other tokens than all others.
    """
    draw, documents = np.random.default_rng(0), []
    for _ in range(N_WINDOWS):
        cut = int(draw.integers(2, 23))
        documents += [draw.integers(1, 1 + LEARNT, size).tolist() for size in (cut, 24 - cut)]
    prefix = str(write_token_file(folder / "tokens", documents))
    path = write_config(folder, prefix, "run", model=MODEL, optimizer=AdamWConfig(lr=5e-3), micro_batch_size=2)
    config = dataclasses.replace(
        load_config(path),
        checkpoint=CheckpointConfig(every_steps=EVERY_STEPS, keep_last=100),
        health=HealthConfig(spike_window=4, spike_z=20.0),
    )
    path.write_text(dump_config(config))
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=VOCAB_SIZE, split="train")
    for window in dataset.documents(np.array(NOISE)):
        for number in (window["first"], window["first"] + 1):
            documents[number] = draw.integers(LEARNT + 1, VOCAB_SIZE, len(documents[number])).tolist()
    write_token_file(folder / "tokens", documents)
    return path


def make_run(folder: Path) -> Path:
    """Makes all starts of the run one after another; returns its directory."""
    path = write_run(folder)
    for number, life in enumerate(LIVES):
        with pytest.MonkeyPatch.context() as patch:
            if life.killed_before is not None:
                fault = f"killed once {folder / f'marker-{number}'}"
                patch.setattr(start, "train_rank", partial(hang_job.train_rank, fault, 0, life.killed_before))
            arguments = ["--ranks", str(life.ranks), "--max-restarts", str(life.restarts)]
            assert main(["train", str(path), *life.overrides, *arguments]) == life.code
    return path.with_suffix("")


@dataclass(frozen=True)
class Draw:
    """A step to replay, and the layout to replay it on."""

    step: int
    ranks: int
    overrides: tuple[str, ...]
    begins_at: int  # the step of the checkpoint to begin at


def draws(path: Path, seed: int = SEED) -> list[Draw]:
    """N_DRAWN different steps with a layout for each; ``path`` is the run's config file, or a config like it."""
    draw = Random(seed)
    steps = draw.sample(range(1, N_STEPS + 1), N_DRAWN)
    return [draw_other(draw, step, load_config(path, life_of(step).overrides)) for step in steps]


def draw_other(draw: Random, step: int, recorded: RunConfig) -> Draw:
    """A random layout that fits the step's config and is not its own, from one of the two checkpoints before it.

    Half of the layouts have a pipeline, since few random layouts that fit have one.
    """
    nearest = (step - 1) // EVERY_STEPS * EVERY_STEPS
    begins_at = draw.choice([at for at in (nearest, nearest - EVERY_STEPS) if at >= 0])
    is_pipeline = draw.choice([True, False])
    while True:
        ranks = draw.choice([1, 2, 3, 4, 4])
        parallel, micro = draw_parallel(draw, ranks), draw.choice([1, 2, 3])
        recompute = draw.choice(["none", "selective", "full"])
        train = dataclasses.replace(recorded.train, micro_batch_size=micro, recompute=recompute)
        config = dataclasses.replace(recorded, parallel=parallel, train=train)
        sizes = {size_of(each) for each in range(begins_at + 1, step + 1)}
        fits = all(not check(of_size(config, size), ranks) for size in sizes)
        is_other = (ranks, parallel) != (life_of(step).ranks, recorded.parallel)
        if fits and is_other and (parallel.pp > 1) == is_pipeline:
            break
    degrees = [
        f"parallel.{name}={getattr(parallel, name)}" for name in ("tp", "pp", "cp", "ep", "zero", "cp_attention")
    ]
    named = f"parallel.pipeline={{name: {parallel.pipeline.name}}}"
    return Draw(
        step, ranks, (*degrees, named, f"train.micro_batch_size={micro}", f"train.recompute={recompute}"), begins_at
    )


def of_size(config: RunConfig, size: int) -> RunConfig:
    """The config with batches of ``size`` sequences and no batch ramp."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch_size=size, batch_ramp=None))
