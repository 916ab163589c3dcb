"""Helpers to train under one layout, load and save the checkpoint again in one process, and export both."""

import dataclasses
from pathlib import Path

from byte_tokenizer import save_byte_tokenizer
from data.dataset import open_dataset
from launcher.commands.export import export
from launcher.config.dump import dump_config
from launcher.config.rules import Precision
from launcher.config.tree import RunConfig
from launcher.training.loop import build_engine, run_step
from launcher.training.state import TrainState, restore, save
from parallel.checkpoint.retention import Retention
from parallel.config import ParallelConfig
from parallel.mesh import close_mesh, open_mesh
from parallel.processes.start import run_ranks

TIMEOUT_SECONDS = 600


def train_and_save(config: RunConfig, n_ranks: int, run: Path) -> None:
    """Trains under the config's layout for train.steps, and saves to the run directory ``run``."""
    (run.parent / "tokenizer").mkdir()
    save_byte_tokenizer(run.parent / "tokenizer")
    run_ranks(_train_rank, n_ranks, config, run, timeout_seconds=TIMEOUT_SECONDS, threads=1)
    (run / "config.yaml").write_text(dump_config(config))


def save_again(config: RunConfig, parallel: ParallelConfig, source: Path, run: Path) -> None:
    """Loads the checkpoint of ``source`` in one process, under ``parallel``, and saves it to the run ``run``.

    The engine first gets weights of another seed, so that one that is not loaded shows.
    """
    run_ranks(_save_again_rank, 1, config, parallel, source, run, timeout_seconds=TIMEOUT_SECONDS, threads=1)
    (run / "config.yaml").write_text(dump_config(config))


def _train_rank(config: RunConfig, run: Path) -> None:
    mesh = open_mesh(config.parallel, TIMEOUT_SECONDS)
    engine = build_engine(config, mesh)
    engine.initialize_weights(config.seed)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    state = TrainState()
    for _ in range(config.train.steps):
        run_step(config, engine, dataset, state)
    save(run / "checkpoints", engine, state, run.parent / "tokenizer", Retention(keep_last=1))
    close_mesh()


def _save_again_rank(config: RunConfig, parallel: ParallelConfig, source: Path, run: Path) -> None:
    mesh = open_mesh(parallel, TIMEOUT_SECONDS)
    engine = build_engine(dataclasses.replace(config, parallel=parallel), mesh)
    engine.initialize_weights(config.seed + 1)
    state, warnings = restore(source / "checkpoints", engine, config.seed + 1)
    assert not warnings and state.step == config.train.steps, warnings
    save(run / "checkpoints", engine, state, run.parent / "tokenizer", Retention(keep_last=1))
    close_mesh()


def exported_bytes(run: Path, out: Path, dtype: Precision, shard_bytes: int) -> dict[str, bytes]:
    """Exports the run to ``out``; returns the bytes of each file by its path in the export."""
    assert export(run, out, dtype, shard_bytes) == 0
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}
