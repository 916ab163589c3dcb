"""The events that a run logs beside its metrics: of its start, checkpoints, compiled chains, packing and damage."""

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
    """Logs an event for each checkpoint in ``saves``: committed or failed, and any warning.

    An event's ``step`` is that of the saved state.
    """
    for saved in saves:
        if saved.error is not None:
            watchers.event({"step": saved.step, "event": "checkpoint_failed", "message": saved.error})
            continue
        seconds = {"seconds": saved.seconds, "hold_seconds": saved.hold_seconds}
        watchers.event({"step": saved.step, "event": "checkpoint", "path": saved.location, **seconds})
        if saved.warning is not None:
            watchers.event({"step": saved.step, "event": "checkpoint_warning", "message": saved.warning})


def report_complete(config: RunConfig, state: TrainState, rank: int, fence: Fence | None) -> None:
    """Prints on rank 0 that the run is complete, and writes its report page where that is missing."""
    if rank == 0:
        if not (config.run_path / REPORT).exists():
            write_at_end(config.run_path, fence)
        done = f"{config.run_path} is complete: step {state.step} of train.steps={config.train.steps}"
        is_heard(f"{done}, in {config.checkpoint_location}; to train on, raise train.steps")


def report_unsaved(saved: Saved, rank: int) -> None:
    """Prints on rank 0 that the last checkpoint that was due could not be written."""
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
    """Logs the events of a start: its record, a restart after a crash, damaged checkpoints, a resume, changes."""
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
    """Logs the event "compiled" where chains were compiled, or loaded from torch's cache, since ``n_before``.

    Steps with such an event took longer by that. Returns the number of chains compiled so far.
    """
    n_now, seconds = compiled_so_far()
    if n_now > n_before:
        watchers.event({"step": step, "event": "compiled", "chains": n_now, "seconds": seconds})
    return n_now


def report_packing(watchers: Watchers | NullWatchers, dataset: Dataset, step: int) -> None:
    """Logs the event "packing" where documents are packed: the shares of padding, cut documents and left-out tokens."""
    shares = dataset.packed
    if shares is not None:
        watchers.event({"step": step, "event": "packing", **shares})


def report_no_heldout_targets(
    watchers: Watchers | NullWatchers, heldout: Dataset | None, n_sequences: int, step: int
) -> None:
    """Logs the event "no_targets" where no target of the held-out sequences counts, so that every loss would be 0."""
    if heldout is not None:
        n_sequences = min(n_sequences, heldout.n_samples)
        if heldout.count(np.arange(n_sequences))[0] == 0:
            watchers.event({"step": step, "event": "no_targets", "split": "heldout", "sequences": n_sequences})


def report_damage(watchers: Watchers | NullWatchers, step: int, warnings: list[str]) -> None:
    """Logs an event for each damaged checkpoint."""
    for warning in warnings:
        watchers.event({"step": step, "event": "damaged_checkpoint", "message": warning})
