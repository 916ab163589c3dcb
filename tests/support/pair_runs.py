"""Tests of checkpoints between layouts: each layout saves once, and each resumes from what the others saved."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.dataset import open_dataset
from launcher.config.tree import RunConfig
from launcher.training.loop import build_engine, run_step
from launcher.training.state import TrainState, restore, save
from parallel.checkpoint.places import step_directory
from parallel.checkpoint.read import open_checkpoint
from parallel.checkpoint.retention import Retention
from parallel.mesh import Mesh, close_mesh, open_mesh
from parallel.processes.start import run_ranks
from parallel.zero.engine import Engine

STEPS = 3  # before the save, and again after it
# A loss scaler's state that differs from a new one's in every field.
ODD_SCALER = {"cur_scale": 512.0, "cur_iter": 41, "last_overflow_iter": 17, "cur_hysteresis": 1}
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Work:
    """One kind of run under one layout, with the checkpoints of other layouts that it resumes from."""

    name: str  # sgd, adamw, bf16, ...: works of the same name can be compared
    config: RunConfig  # train.steps is 2 STEPS
    sources: tuple[str, ...] = ()  # folders of checkpoints, relative to the matrix's
    resaves: bool = False  # whether to save again what was loaded, and compare every tensor with the source


@dataclass
class Saved:
    """The result of an uninterrupted run that saved a checkpoint halfway."""

    rows: list[dict[str, Any]]  # 2 STEPS
    state: str  # a hash of this rank's weights and optimizer states at the end


@dataclass
class Loaded:
    """The result of a run that resumed from a checkpoint."""

    rows: list[dict[str, Any]]  # STEPS
    state: str
    start: TrainState  # the state in the checkpoint
    differing: list[str] = field(default_factory=list)  # "kind of name" whose bits changed between load and save


def save_under(layout: str, n_ranks: int, works: Sequence[Work], folder: Path) -> list[dict[str, Saved]]:
    """Runs each work under the layout, with a checkpoint halfway in folder/work/layout; the results of each rank."""
    return run_ranks(_save_rank, n_ranks, layout, works, folder, timeout_seconds=TIMEOUT_SECONDS, threads=1)


def load_under(
    layout: str, n_ranks: int, works: Sequence[Work], folder: Path, before: Callable[[], None] | None = None
) -> dict[tuple[str, str], Loaded]:
    """Resumes under the layout from each source of each work; (work, source) -> result, the ranks' hashes joined.

    ``before`` runs first in every rank.
    """
    ranks = run_ranks(_load_rank, n_ranks, layout, works, folder, before, timeout_seconds=TIMEOUT_SECONDS, threads=1)
    merged = ranks[0]
    for key, loaded in merged.items():
        loaded.state = " ".join(rank[key].state for rank in ranks)
    return merged


def _save_rank(layout: str, works: Sequence[Work], folder: Path) -> dict[str, Saved]:
    mesh = open_mesh(works[0].config.parallel, TIMEOUT_SECONDS)
    saved = {work.name: _save_one(work, mesh, folder / work.name / layout) for work in works}
    close_mesh()
    return saved


def _save_one(work: Work, mesh: Mesh, folder: Path) -> Saved:
    config = work.config
    engine = build_engine(config, mesh)
    engine.initialize_weights(config.seed)
    engine.restore_loss_scaler(ODD_SCALER)
    dataset = _open(config)
    state = TrainState()
    rows = [run_step(config, engine, dataset, state).row for _ in range(STEPS)]
    save(folder, engine, state, None, Retention(keep_last=1))
    rows += [run_step(config, engine, dataset, state).row for _ in range(STEPS)]
    return Saved(rows, hash_state(engine))


def _load_rank(
    layout: str, works: Sequence[Work], folder: Path, before: Callable[[], None] | None
) -> dict[tuple[str, str], Loaded]:
    if before is not None:
        before()
    mesh = open_mesh(works[0].config.parallel, TIMEOUT_SECONDS)
    loaded = {}
    for work in works:
        engine = build_engine(work.config, mesh)
        for source in work.sources:
            again = folder / "again" / layout / work.name / source if work.resaves else None
            loaded[work.name, source] = _load_one(work, engine, folder / source, again)
    close_mesh()
    return loaded


def _load_one(work: Work, engine: Engine, source: Path, again: Path | None) -> Loaded:
    """Loads one source and trains on.

    The engine holds weights of another seed and the states of the last run before, so that anything not loaded shows.
    """
    config = work.config
    engine.initialize_weights(config.seed + 1)
    state, warnings = restore(source, engine, config.seed + 1)
    assert not warnings, warnings
    start = TrainState(**vars(state))
    differing = []
    if again is not None:
        save(again, engine, state, None, Retention(keep_last=1))
        if engine.mesh.rank == 0:
            differing = compare(step_directory(source, state.step), step_directory(again, state.step))
    dataset = _open(config)
    rows = [run_step(config, engine, dataset, state).row for _ in range(STEPS)]
    return Loaded(rows, hash_state(engine), start, differing)


def _open(config: RunConfig) -> Any:
    return open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")


def compare(before: Path, after: Path) -> list[str]:
    """A line for each logical tensor that differs in any bit between two checkpoints, and for each differing scalar."""
    old, new = open_checkpoint(before), open_checkpoint(after)
    differing = []
    for kind in sorted({*old.manifest.kinds, *new.manifest.kinds}):
        if set(old.names(kind)) != set(new.names(kind)):
            differing.append(f"the names of kind {kind}")
            continue
        for name in old.names(kind):
            if old.read(name, kind).numpy().tobytes() != new.read(name, kind).numpy().tobytes():
                differing.append(f"{kind} of {name}")
    scalars = {*old.manifest.scalars, *new.manifest.scalars} - {"written_by"}
    if not (old.manifest.scalars["loss_scaler"] and new.manifest.scalars["loss_scaler"]):
        scalars.discard("loss_scaler")  # one of the two is not fp16
    return differing + sorted(key for key in scalars if old.manifest.scalars.get(key) != new.manifest.scalars.get(key))


def hash_state(engine: Engine) -> str:
    """A hash of every bit of weights, optimizer states and buffers that this rank holds."""
    digest = hashlib.sha256()
    for fragment in engine.fragments:
        for kind, flat in engine.pieces(fragment).items():
            digest.update(f"{kind} {fragment.name}".encode())
            digest.update(flat.numpy().tobytes())
    for name, buffer in engine.model.named_buffers():
        digest.update(name.encode() + buffer.numpy().tobytes())
    return digest.hexdigest()
