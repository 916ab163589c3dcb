"""Functions that tests of the checkpoint saver run in each rank: saves that succeed, fail, or are broken on purpose."""

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from data.dataset import open_dataset
from launcher.config.tree import RunConfig
from launcher.guard.fence import StaleRun, raise_fence
from launcher.training.loop import build_engine, run_step
from launcher.training.run_dir import claim
from launcher.training.state import TrainState
from launcher.watch.metrics import MetricsFile
from parallel.checkpoint import saver as saver_module
from parallel.checkpoint import write
from parallel.checkpoint.boxes import Box
from parallel.checkpoint.cuts import Owned
from parallel.checkpoint.errors import BrokenSave
from parallel.checkpoint.local import LocalStore
from parallel.checkpoint.places import open_store
from parallel.checkpoint.saver import Hooks, Saved, Saver
from parallel.mesh import close_mesh, open_mesh
from parallel.zero.engine import Engine

FAULTS = ("one rank's experts written for all", "a moment forgotten", "an overlap", "a gap")
TIMEOUT_SECONDS = 240
Collected = tuple[list[Owned], dict[str, Tensor]]


def opened(config: RunConfig) -> Engine:
    """An engine at step 0 with optimizer states that are not all zero."""
    mesh = open_mesh(config.parallel, TIMEOUT_SECONDS)
    engine = build_engine(config, mesh)
    engine.initialize_weights(config.seed)
    for fragment in engine.fragments:
        for number, values in enumerate(engine.pieces(fragment).values()):
            values.add_(0.5 * number)
    return engine


def owned(engine: Engine) -> dict[tuple[str, str, tuple[int, ...]], Tensor]:
    """(kind, name, start) -> a copy of each piece that this rank would write to a checkpoint."""
    found, tensors = write.collect_owned(engine)
    pieces = [piece for each in found for piece in each.pieces("")]
    return {(piece.kind, piece.name, piece.start): tensors[piece.key].clone() for piece in pieces}


@dataclass
class Witness:
    """One rank's saves, the state at the first one, and the order of syncs and commits."""

    saves: list[Saved]
    state: dict[tuple[str, str, tuple[int, ...]], Tensor]  # at the first save
    events: list[str]


def save_whole(config: RunConfig, checkpoints: str, asynchronous: bool) -> Witness:
    """Saves twice, and changes the state right after the first save returns, which must not change what is on disk."""
    return save_changing_state(opened(config), checkpoints, asynchronous)


def save_slowly(config: RunConfig, checkpoints: str, waits: bool) -> Witness:
    """Saves twice asynchronously with copies that are made late; without ``waits`` nothing waits for the copies."""
    engine = opened(config)
    with late_copies(engine, waits) as over:
        return save_changing_state(engine, checkpoints, True, over)


def save_beside_a_step(config: RunConfig, checkpoints: str, waits: bool) -> Witness:
    """Saves after the first update with a late copy; without ``waits`` the second update does not wait for the copy."""
    engine = opened(config)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    progress = TrainState()
    with late_copies(engine, waits) as over, Saver(open_store(checkpoints), engine) as saver:
        run_step(config, engine, dataset, progress)
        state = owned(engine)
        saver.save(progress)
        run_step(config, engine, dataset, progress)
        over.set()
        saves = saver.wait()
    close_mesh()
    return Witness(saves, state, [])


@contextmanager
def late_copies(engine: Engine, waits: bool) -> Iterator[threading.Event]:
    """A context in which savers copy half a second late, or without ``waits`` only when the event is set: too late."""
    copy_all, over = saver_module.copy_all, threading.Event()

    def late(*arguments: Any) -> None:
        over.wait(0.5 if waits else TIMEOUT_SECONDS)
        copy_all(*arguments)

    saver_module.copy_all = late
    if not waits:
        engine.announce_change = lambda: None
    yield over
    saver_module.copy_all = copy_all


def save_changing_state(
    engine: Engine, checkpoints: str, asynchronous: bool, changed: threading.Event | None = None
) -> Witness:
    """Saves an engine twice; in between, its weights change sign and ``changed`` is set."""
    events = []
    hooks = Hooks(lambda: events.append("synced"), after_commit=lambda store: events.append("committed"))
    with Saver(open_store(checkpoints), engine, asynchronous=asynchronous, hooks=hooks) as saver:
        state = owned(engine)
        saver.save(TrainState(step=1, consumed=8))
        for fragment in engine.fragments:
            engine.pieces(fragment)["weight"].mul_(-1)
        if changed is not None:
            changed.set()
        saver.save(TrainState(step=2, consumed=16))
        saves = saver.wait()
        assert not saver.is_writing
    close_mesh()
    return Witness(saves, state, events)


def save_faulty(config: RunConfig, folder: Path) -> dict[str, Saved]:
    """Saves once with each of FAULTS planted, then once without; returns each fault's result ("none": the last)."""
    engine = opened(config)
    found = {}
    with Saver(LocalStore(folder), engine) as saver:
        for step, fault in enumerate((*FAULTS, "none"), 1):
            with planted(fault, engine):
                saver.save(TrainState(step=step))
                (found[fault],) = saver.wait()
    close_mesh()
    return found


@contextmanager
def planted(fault: str, engine: Engine) -> Iterator[None]:
    """A context in which rank 1's saver is broken in the named way."""
    collect = write.collect_owned

    def broken(*arguments: Any) -> Collected:
        owned, tensors = collect(*arguments)
        return (spoil(fault, owned), tensors) if engine.mesh.rank == 1 else (owned, tensors)

    write.collect_owned = broken
    try:
        yield
    finally:
        write.collect_owned = collect


def spoil(fault: str, owned: list[Owned]) -> list[Owned]:
    """The list of what the rank owns as a saver with the fault would give it."""
    match fault:
        case "one rank's experts written for all":  # each rank calls its own experts the first ones
            return [as_first(each) if ".experts." in each.name else each for each in owned]
        case "a moment forgotten":
            return [replace(each, kinds=tuple(kind for kind in each.kinds if kind != "exp_avg_sq")) for each in owned]
        case "an overlap":
            victim = next(each for each in owned if each.first > 0)
            return [replace(each, first=each.first - 1) if each is victim else each for each in owned]
        case "a gap":
            victim = max(owned, key=lambda each: each.numel)
            return [replace(each, numel=each.numel - 1) if each is victim else each for each in owned]
        case "none":
            return owned
        case _:
            raise AssertionError(fault)


def as_first(owned: Owned) -> Owned:
    """The same shape of elements, declared to belong to the first experts."""
    return replace(owned, held=Box((0, *owned.held.start[1:]), owned.held.shape))


def save_with_failing_disk(config: RunConfig, folder: Path, asynchronous: bool) -> list[Saved]:
    """Saves three times; in the second save, the system refuses rank 1 to write more than 1000 bytes to a file."""
    engine, saves = opened(config), []
    with Saver(LocalStore(folder), engine, asynchronous=asynchronous) as saver:
        for step in (1, 2, 3):
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if step == 2 and engine.mesh.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            saver.save(TrainState(step=step))
            saves += saver.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    close_mesh()
    return saves


def save_beside_a_hanging_rank(config: RunConfig, folder: Path) -> tuple[str, float]:
    """Saves while rank 1's writer hangs longer than the saver waits; returns this rank's error and seconds waited."""
    engine = opened(config)
    saver = Saver(LocalStore(folder), engine, timeout_seconds=2)
    if engine.mesh.rank == 1:
        delay(saver, 8.0)
    started = time.monotonic()
    saver.save(TrainState(step=1))
    try:
        saver.wait()
    except BrokenSave as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


def delay(saver: Saver, seconds: float) -> None:
    """Makes the saver's writer take ``seconds`` longer."""
    write_own: Callable[..., Any] = saver._write_own

    def slow(*arguments: Any) -> Any:
        time.sleep(seconds)
        return write_own(*arguments)

    saver._write_own = slow


def write_on_after_losing_the_fence(config: RunConfig, taken: Path, lost: Path) -> dict[str, str]:
    """Saves and logs under the run's claim, and again after another process has raised the fence; returns the errors.

    ``taken`` is created when this process has saved; it goes on once ``lost`` exists.
    """
    said = {}
    with claim(config) as claimed:
        engine = opened(config)
        metrics = MetricsFile.resume(config.run_path / "metrics.jsonl", 0, claimed.fence.held)
        metrics.write({"step": 1, "loss": 1.0})
        hooks = Hooks(guard=claimed.fence.held)
        saver = Saver(LocalStore(config.run_path / "checkpoints"), engine, tag=str(claimed.fence.token), hooks=hooks)
        saver.save(TrainState(step=1))
        said["before"] = str(saver.wait()[0].error)
        taken.touch()
        while not lost.exists():
            time.sleep(0.02)
        try:
            metrics.write({"step": 2, "loss": 1.0})
        except StaleRun as error:
            said["metrics"] = str(error)
        saver.save(TrainState(step=2))
        try:
            saver.wait()
        except BrokenSave as error:
            said["commit"] = str(error)
    return said


def raise_fence_when_taken(run_path: Path, taken: Path, lost: Path) -> int:
    """Raises the run's fence as a start elsewhere would, once ``taken`` exists; creates ``lost``, returns the token."""
    while not taken.exists():
        time.sleep(0.02)
    token = raise_fence(run_path).token
    lost.touch()
    return token
