"""One rank of a replay: executes the steps after the checkpoint with the trainer's own step. Writes nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.dataset import Dataset, open_dataset
from data.order import take
from data.spans import DocumentPart, document_parts
from launcher.errors import UserError
from launcher.prove.rank import note_progress
from launcher.replay.plan import Plan, damage_line
from launcher.replay.seen import StepSeen, StepWatch, WatchedEngine, gather_seen
from launcher.training.health import Health
from launcher.training.ledger import ledger_row
from launcher.training.loop import build_engine, prepare_process, run_step
from launcher.training.state import TrainState, set_first_weights, state_in
from parallel.checkpoint.load import load_state, open_together
from parallel.checkpoint.manifest import DamagedCheckpoint
from parallel.checkpoint.places import open_folder
from parallel.mesh import opened_mesh
from parallel.zero.engine import Engine


@dataclass
class StepAgain:
    """The result of one replayed step: its metrics.jsonl row, its ledger.jsonl row, and its event if there was one."""

    row: dict[str, Any]
    samples: dict[str, Any]
    event: dict[str, Any] | None


@dataclass
class Found:
    """The result of a replay, which rank 0 returns: all steps, and details of the last one."""

    steps: dict[int, StepAgain]
    seen: StepSeen
    indices: np.ndarray  # the samples of the last step
    tokens: np.ndarray  # its inputs and targets, (samples, positions)
    targets: np.ndarray
    parts: list[DocumentPart]


# Called with engine, dataset and the last step's samples before that step is executed; it must change nothing.
Look = Callable[[WatchedEngine, Dataset, np.ndarray], None]


def replay_rank(plan: Plan, look: Look | None = None) -> Found | None:
    """Builds mesh, dataset and engine and executes the plan. All ranks call it; rank 0 gets the result, others None."""
    config = plan.config
    prepare_process(config)
    with opened_mesh(config.parallel, config.train.timeout_seconds) as mesh:
        dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
        engine = build_engine(config, mesh, engine_class=WatchedEngine)
        assert isinstance(engine, WatchedEngine)
        return execute(plan, engine, dataset, look)


def execute(plan: Plan, engine: WatchedEngine, dataset: Dataset, look: Look | None = None) -> Found | None:
    """Executes the plan's steps and records the last one in detail. All ranks call it; rank 0 gets the result.

    ``look`` is called before the last step.
    """
    watch, indices = None, np.empty(0, np.int64)

    def before(step: int, samples: np.ndarray) -> None:
        nonlocal watch, indices
        if step == plan.step:
            indices = samples
            if look is not None:
                look(engine, dataset, indices)
            watch = StepWatch(engine, indices, plan.configs[step].train.micro_batch_size)

    steps = steps_again(plan, engine, dataset, before)
    assert watch is not None
    mtp = plan.config.model.mtp
    mine = watch.seen(plan.config.data.seq_len, mtp.depth if mtp is not None else 0)
    seen = gather_seen(mine, engine)
    if seen is None:
        return None
    batch = dataset.read(indices)
    return Found(steps, seen, indices, batch.tokens_BS, batch.targets_BS, document_parts(dataset, indices))


def steps_again(
    plan: Plan, engine: Engine, dataset: Dataset, before: Callable[[int, np.ndarray], None], why: str = ""
) -> dict[int, StepAgain]:
    """Executes the plan's steps from its checkpoint on; returns each step's result. All ranks call it.

    ``before`` is called with each step's number and sample indices before the step. ``why`` begins the progress line
    that rank 0 writes for each step.
    """
    state, steps = state_before(plan, engine), {}
    known = list(state.skipped)  # a branched run's record lacks those of the run that it was branched from
    health, judged_by = Health(plan.config.health), plan.config.health
    for step in range(plan.begins_at + 1, plan.step + 1):
        config = plan.configs[step]
        state.skipped, consumed = [*known, *plan.skipped[step]], state.consumed
        if config.health != judged_by:
            health, judged_by = Health(config.health), config.health
        if engine.mesh.rank == 0:
            note_progress(plan.config.run_path, f"{why}step {step}, the last is {plan.step}")
        before(step, take(consumed, config.train.batches.size_at(step), state.skipped))
        done = run_step(config, engine, dataset, state, health=health)
        steps[step] = StepAgain(done.row, ledger_row(state, consumed, trained=done.trained), done.event)
    return steps


def state_before(plan: Plan, engine: Engine) -> TrainState:
    """Loads the plan's checkpoint, or the initial weights of step 0, into the engine. All ranks call it.

    Returns the training state to go on from. Where the checkpoint is damaged, all ranks end with exit code 2: rank 0
    by a UserError that says why, the others by SystemExit.
    """
    if plan.checkpoint is None:
        set_first_weights(engine, plan.config.seed, plan.config.init_from)
        return TrainState()
    folder = open_folder(plan.checkpoint)
    try:
        checkpoint = open_together(folder, engine.mesh)
        load_state(engine, checkpoint)
    except DamagedCheckpoint as error:
        if engine.mesh.rank != 0:
            raise SystemExit(2) from None
        raise UserError([damage_line(plan.run_path, folder.name, error)]) from None
    return state_in(checkpoint)
