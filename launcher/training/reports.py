"""What a run says of itself beside its metrics: events of its start, its saves, what was compiled, what is wrong."""

from typing import Any

import numpy as np

from data.dataset import Dataset
from launcher.config.tree import RunConfig
from launcher.console import is_heard, tell
from launcher.guard.fence import Fence
from launcher.guard.restarts import Restart
from launcher.report.at_end import write_at_end
from launcher.training.compiling import compiled_so_far
from launcher.training.run_parts import REPORT
from launcher.training.stage_changes import STAGES, told_of_stages
from launcher.training.state import TrainState
from launcher.watch.watchers import NullWatchers, Watchers
from parallel.checkpoint.saver import Saved


def report_saves(watchers: Watchers | NullWatchers, saves: list[Saved]) -> None:
    """Events of the checkpoints that were committed, or failed, since the last look. A row's step is the state's."""
    for saved in saves:
        if saved.error is not None:
            watchers.event({"step": saved.step, "event": "checkpoint_failed", "message": saved.error})
            continue
        seconds = {"seconds": saved.seconds, "hold_seconds": saved.hold_seconds}
        watchers.event({"step": saved.step, "event": "checkpoint", "path": saved.location, **seconds})
        if saved.warning is not None:
            watchers.event({"step": saved.step, "event": "checkpoint_warning", "message": saved.warning})


def report_complete(config: RunConfig, state: TrainState, rank: int, fence: Fence | None) -> None:
    """Says that there is nothing to do, once; writes the run's page where it was ended before it had one."""
    if rank == 0:
        if not (config.run_path / REPORT).exists():
            write_at_end(config.run_path, fence)
        done = f"{config.run_path} is complete: step {state.step} of train.steps={config.train.steps}"
        is_heard(f"{done}, in {config.checkpoint_location}; to train on, raise train.steps")


def report_unsaved(saved: Saved, rank: int) -> None:
    """Says that the last checkpoint that was due could not be written, once."""
    if rank == 0:
        tell(f"the last checkpoint, step {saved.step}, was not written: {saved.error}")


def report_start(
    watchers: Watchers | NullWatchers,
    config: RunConfig,
    record: dict[str, Any],
    state: TrainState,
    warnings: list[str],
    changed: list[tuple[str, Any, Any]],
    restart: Restart | None,
) -> None:
    """Events of a run's start: where and what it is, a crash before it, a checkpoint set aside, a resume, changes."""
    watchers.event({"step": state.step, "event": "start", **record})
    if restart is not None:
        row = {"restart": restart.number, "max_restarts": restart.allowed, "reason": restart.reason}
        watchers.event({"step": state.step, "event": "restart", **row})
    report_damage(watchers, state.step, warnings)
    if state.step:
        watchers.event({"step": state.step, "event": "resume", "consumed": state.consumed})
    for key, before, after in changed:
        told = told_of_stages(config, before, state.consumed) if key == STAGES else {}
        row = {"key": key, "from": str(before), "to": str(after), **told}
        watchers.event({"step": state.step, "event": "config_change", **row})


def report_compiled(watchers: Watchers | NullWatchers, step: int, n_before: int) -> int:
    """The event of a step that chains were compiled in, or fetched from torch's cache: it took that much longer.

    Returns how many there are now.
    """
    n_now, seconds = compiled_so_far()
    if n_now > n_before:
        watchers.event({"step": step, "event": "compiled", "chains": n_now, "seconds": seconds})
    return n_now


def report_packing(watchers: Watchers | NullWatchers, dataset: Dataset, step: int) -> None:
    """The event of documents that are packed: how much of the samples is padding, how many documents are cut."""
    shares = dataset.packed
    if shares is not None:
        watchers.event({"step": step, "event": "packing", **shares})


def report_no_heldout_targets(
    watchers: Watchers | NullWatchers, heldout: Dataset | None, n_sequences: int, step: int
) -> None:
    """The event of held-out sequences in which no target counts, so that every evaluation comes to 0."""
    if heldout is not None:
        n_sequences = min(n_sequences, heldout.n_samples)
        if heldout.count(np.arange(n_sequences))[0] == 0:
            watchers.event({"step": step, "event": "no_targets", "split": "heldout", "sequences": n_sequences})


def report_damage(watchers: Watchers | NullWatchers, step: int, warnings: list[str]) -> None:
    """Events of checkpoints that could not be used."""
    for warning in warnings:
        watchers.event({"step": step, "event": "damaged_checkpoint", "message": warning})
