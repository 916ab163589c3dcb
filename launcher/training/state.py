"""A run's training state besides tensors (its progress in updates and data), and saving and restoring it."""

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from data.mixture import DEALING
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.guard.fence import Fence
from launcher.guard.watchdog import Watchdog
from launcher.training.newest import lost_line, read_newest, write_newest
from launcher.training.owner import keeping
from launcher.training.run_parts import CONFIG, WITHOUT
from launcher.watch.watchers import NullWatchers, Watchers
from parallel.checkpoint.errors import IncompleteSave
from parallel.checkpoint.load import load_state, load_weights, open_together
from parallel.checkpoint.manifest import DamagedCheckpoint
from parallel.checkpoint.places import local_path, open_folder, open_store
from parallel.checkpoint.read import Checkpoint
from parallel.checkpoint.retention import Retention
from parallel.checkpoint.saver import Hooks, Saver
from parallel.checkpoint.store import Store
from parallel.mesh import Mesh
from parallel.zero.engine import Engine


@dataclass
class TrainState:
    """A run's progress. Together with the engine's tensors it is exactly what a checkpoint holds."""

    step: int = 0  # updates made or skipped
    consumed: int = 0  # the number of the next sample in the training order
    skipped: list[tuple[int, int]] = field(default_factory=list)  # half-open ranges of samples left out after rollbacks
    tokens: int = 0  # real tokens seen
    heldout: tuple[int, float] | None = None  # the latest held-out loss: after which update, and its value
    losses: list[float] = field(default_factory=list)  # of the last updates, with which health compares the next one

    def scalars(self, engine: Engine) -> dict[str, Any]:
        """The state as a checkpoint's manifest records it, with the engine's counters, loss scaler and layout."""
        return {
            "consumed": self.consumed,
            "dealing": DEALING,
            "skipped": list(self.skipped),
            "tokens": self.tokens,
            "heldout": self.heldout,
            "losses": list(self.losses),
            "updates": engine.updates(),
            "loss_scaler": engine.loss_scaler_state(),
            "written_by": layout_of(engine),
        }


def layout_of(engine: Engine) -> dict[str, Any]:
    """The layout and precision that wrote a checkpoint, recorded for information only: loading does not need them."""
    degrees = {name: getattr(engine.mesh, name).degree for name in ("pp", "dp", "cp", "tp", "ep")}
    return {"ranks": engine.mesh.world_size, **degrees, "zero": engine.zero, "precision": engine.precision}


def restore(
    checkpoints: Path | str, engine: Engine, seed: int, init_from: str | None = None, run_path: Path | None = None
) -> tuple[TrainState, list[str]]:
    """Loads the newest good checkpoint, or step 0, into the engine; returns (state, warnings). All ranks call it.

    A damaged checkpoint is set aside (renamed step-N.damaged), so that step N can be saved again. Where all are
    damaged, or gone though ``run_path`` has one on record, nothing is changed, and all ranks end with exit code 2.
    """
    store, mesh = open_store(checkpoints), engine.mesh
    damaged: dict[str, str] = {}
    newest = read_newest(run_path) if run_path is not None and mesh.rank == 0 else None
    shared = [(store.names(), newest)] if mesh.rank == 0 else [None]
    dist.broadcast_object_list(shared, src=0, group=mesh.control)
    names, newest = shared[0] or ([], None)
    for name in reversed(names):
        try:
            checkpoint = open_together(store.folder(name), mesh)
            load_state(engine, checkpoint)
        except DamagedCheckpoint as error:
            damaged[name] = str(error)
            continue
        return state_in(checkpoint), set_aside(store, damaged, mesh)
    if names or newest is not None:
        found = [f"{name} is damaged: {reason}" for name, reason in damaged.items()]
        end_with(lost_line(run_path or local_path(checkpoints).parent, str(checkpoints), found, newest), mesh.rank)
    set_first_weights(engine, seed, init_from)
    return TrainState(), []


def set_aside(store: Store, damaged: Mapping[str, str], mesh: Mesh) -> list[str]:
    """Renames the damaged checkpoints, after every rank has stopped reading them; returns the warnings.

    ``damaged``: a checkpoint's name -> what is wrong with it. All ranks call it.
    """
    if damaged:
        dist.barrier(group=mesh.control)
        for name in damaged if mesh.rank == 0 else ():
            store.set_aside(name)
        dist.barrier(group=mesh.control)
    return [f"checkpoint {name} is damaged and was set aside: {reason}" for name, reason in damaged.items()]


def end_with(line: str, rank: int) -> NoReturn:
    """Ends all ranks with exit code 2: rank 0 raises UserError with the line, the others exit. All ranks call it."""
    if rank != 0:
        raise SystemExit(2)
    raise UserError([line])


def state_in(checkpoint: Checkpoint) -> TrainState:
    """The run's state when the checkpoint was saved, read from its manifest."""
    scalars = checkpoint.manifest.scalars
    skipped = [(first, last) for first, last in scalars["skipped"]]
    heldout = tuple(scalars["heldout"]) if scalars["heldout"] is not None else None
    losses = scalars.get("losses", [])  # missing from checkpoints written before health was judged
    return TrainState(checkpoint.step, scalars["consumed"], skipped, scalars["tokens"], heldout, losses)


def tidy(config: RunConfig, retention: Retention, fence: Fence | None, rank: int) -> None:
    """Records the newest checkpoint, and deletes unfinished saves and checkpoints that a crash left undeleted.

    Rank 0 does it, before training; the other ranks do nothing.
    """
    if rank == 0:
        with (
            suppress(OSError),
            keeping(config, fence) if fence is not None else nullcontext(),
        ):  # the next save tries again
            keep(config, retention, open_store(config.checkpoint_location))


def keep(config: RunConfig, retention: Retention, store: Store) -> None:
    """Records the newest checkpoint in the run directory, and deletes those that the retention rules do not keep."""
    names = store.names()
    if names:
        with suppress(OSError):  # a full disk; the next checkpoint tries again
            write_newest(config.run_path, names[-1], config.checkpoint_location)
    retention.apply(store)


def open_saver(
    config: RunConfig,
    engine: Engine,
    tokenizer: Path | None,
    retention: Retention,
    fence: Fence | None,
    watchers: Watchers | NullWatchers,
    watchdog: Watchdog,
) -> Saver:
    """The saver that writes the run's checkpoints, with the config and tokenizer attached. All ranks call it.

    Rank 0 commits each checkpoint under ``fence``.
    """
    hooks = Hooks(
        before_commit=watchers.sync,
        guard=partial(keeping, config, fence) if fence is not None else nullcontext,
        after_commit=partial(keep, config, retention),
        while_waiting=lambda: watchdog.beat(watchdog.step, watchdog.phase),
    )
    writes = engine.mesh.rank == 0  # rank 0 alone writes attachments, and writing a config as YAML takes 0.04 s
    attachments: dict[str, Path | bytes] = {}
    if writes:
        read = {name: path.read_bytes() for name, path in tokenizer_files(tokenizer).items()}  # it may be deleted
        attachments = {CONFIG: dump_config(config).encode(), **read}
        if config.data.without is not None:
            attachments[WITHOUT] = Path(config.data.without).read_bytes()
    return Saver(
        open_store(config.checkpoint_location),
        engine,
        asynchronous=config.checkpoint.asynchronous,
        timeout_seconds=config.checkpoint.timeout_seconds,
        tag=str(fence.token) if fence is not None else "0",
        attachments=attachments,
        hooks=hooks,
    )


def tokenizer_files(tokenizer: Path | None) -> dict[str, Path]:
    """Name in a checkpoint -> path, of each file of a tokenizer's folder; empty for None."""
    found = sorted(path for path in tokenizer.iterdir() if path.is_file()) if tokenizer is not None else []
    return {f"tokenizer/{path.name}": path for path in found}


def save(checkpoints: Path, engine: Engine, state: TrainState, tokenizer: Path | None, retention: Retention) -> None:
    """Writes one checkpoint of the state and waits for it. All ranks call it; all raise IncompleteSave together."""
    hooks = Hooks(after_commit=retention.apply)
    attachments = tokenizer_files(tokenizer)
    with Saver(open_store(checkpoints), engine, asynchronous=False, attachments=attachments, hooks=hooks) as saver:
        saver.save(state)
        (saved,) = saver.wait()
    if saved.error is not None:
        raise IncompleteSave(saved.error)


def set_first_weights(engine: Engine, seed: int, init_from: str | None) -> None:
    """Sets the weights before step 1: drawn from ``seed``, or those of the checkpoint ``init_from``. All ranks call it.

    Where that checkpoint is damaged, all ranks end with exit code 2, and rank 0 says why.
    """
    if init_from is None:
        engine.initialize_weights(seed)
        return
    try:
        load_weights(engine, open_together(open_folder(init_from), engine.mesh))
    except DamagedCheckpoint as error:
        remedy = "put it back, or begin another run with another checkpoint"
        end_with(f"init_from={init_from} is damaged ({error}); {remedy}", engine.mesh.rank)
