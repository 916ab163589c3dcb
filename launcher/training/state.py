"""What a checkpoint holds besides tensors: how far the run is, in updates and in data. Saving and restoring a run."""

from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from data.mixture import DEALING
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.guard.fence import Fence
from launcher.guard.watchdog import Watchdog
from launcher.training.run_parts import CONFIG, WITHOUT
from launcher.watch.watchers import NullWatchers, Watchers
from parallel.checkpoint.errors import IncompleteSave
from parallel.checkpoint.load import load_state, load_weights, open_together
from parallel.checkpoint.manifest import DamagedCheckpoint
from parallel.checkpoint.places import open_folder, open_store
from parallel.checkpoint.read import Checkpoint
from parallel.checkpoint.retention import Retention
from parallel.checkpoint.saver import Hooks, Saver
from parallel.zero.engine import Engine


@dataclass
class TrainState:
    """Together with the engine's tensors, exactly what a checkpoint holds."""

    step: int = 0  # updates made or skipped
    consumed: int = 0  # where the next sample lies in the order of samples
    skipped: list[tuple[int, int]] = field(default_factory=list)  # ranges of samples that are not to be trained on
    tokens: int = 0  # real tokens seen
    heldout: tuple[int, float] | None = None  # the latest held-out loss: after which update, and its value
    losses: list[float] = field(default_factory=list)  # of the last updates, which the next one's is judged by

    def scalars(self, engine: Engine) -> dict[str, Any]:
        """For the checkpoint's manifest."""
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
    """The layout and precision, for whoever looks at a checkpoint: loading does not need them."""
    degrees = {name: getattr(engine.mesh, name).degree for name in ("pp", "dp", "cp", "tp", "ep")}
    return {"ranks": engine.mesh.world_size, **degrees, "zero": engine.zero, "precision": engine.precision}


def restore(
    checkpoints: Path | str, engine: Engine, seed: int, init_from: str | None = None
) -> tuple[TrainState, list[str]]:
    """The state of the newest good checkpoint, or of step 0, loaded into the engine; and warnings.

    A damaged checkpoint is set aside (renamed step-N.damaged), so that step N can be saved again. All ranks call it.
    """
    store, mesh, warnings = open_store(checkpoints), engine.mesh, []
    shared = [store.names()] if mesh.rank == 0 else [None]
    dist.broadcast_object_list(shared, src=0, group=mesh.control)
    for name in reversed(shared[0] or []):
        try:
            checkpoint = open_together(store.folder(name), mesh)
            load_state(engine, checkpoint)
        except DamagedCheckpoint as error:
            warnings.append(f"checkpoint {name} is damaged and was set aside: {error}")
            dist.barrier(group=mesh.control)
            if mesh.rank == 0:
                store.set_aside(name)
            dist.barrier(group=mesh.control)
            continue
        return state_in(checkpoint), warnings
    set_first_weights(engine, seed, init_from)
    return TrainState(), warnings


def state_in(checkpoint: Checkpoint) -> TrainState:
    """How far the run was when the checkpoint was saved: all that it holds besides tensors."""
    scalars = checkpoint.manifest.scalars
    skipped = [(first, last) for first, last in scalars["skipped"]]
    heldout = tuple(scalars["heldout"]) if scalars["heldout"] is not None else None
    losses = scalars.get("losses", [])  # which checkpoints before health was judged lack
    return TrainState(checkpoint.step, scalars["consumed"], skipped, scalars["tokens"], heldout, losses)


def tidy(config: RunConfig, retention: Retention, fence: Fence | None, rank: int) -> None:
    """Deletes what an interrupted save left, and what a crash kept from being deleted. Rank 0 does it."""
    if rank == 0:
        with suppress(OSError), fence.held() if fence is not None else nullcontext():  # the next save tries again
            retention.apply(open_store(config.checkpoint_location))


def open_saver(
    config: RunConfig,
    engine: Engine,
    tokenizer: Path | None,
    retention: Retention,
    fence: Fence | None,
    watchers: Watchers | NullWatchers,
    watchdog: Watchdog,
) -> Saver:
    """What writes the run's checkpoints. All ranks call it; rank 0 commits under ``fence``."""
    hooks = Hooks(
        before_commit=watchers.sync,
        guard=fence.held if fence is not None else nullcontext,
        after_commit=retention.apply,
        while_waiting=lambda: watchdog.beat(watchdog.step, watchdog.phase),
    )
    writes = engine.mesh.rank == 0  # rank 0 alone writes attachments, and writing a config as YAML takes 0.04 s
    attachments: dict[str, Path | bytes] = {}
    if writes:
        attachments = {CONFIG: dump_config(config).encode(), **tokenizer_files(tokenizer)}
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
    """The files of a tokenizer's folder, under the names that they have in a checkpoint."""
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
    """The weights before step 1: drawn from ``seed``, or those of the checkpoint ``init_from``. All ranks call it.

    Where that is damaged, all ranks end with exit code 2, of which rank 0 says why.
    """
    if init_from is None:
        engine.initialize_weights(seed)
        return
    try:
        load_weights(engine, open_together(open_folder(init_from), engine.mesh))
    except DamagedCheckpoint as error:
        if engine.mesh.rank != 0:
            raise SystemExit(2) from None
        line = f"init_from={init_from} is damaged ({error}); name another checkpoint"
        raise UserError([line]) from None
