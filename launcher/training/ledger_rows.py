"""The samples that each step of a run consumed, from its ledger.jsonl, or else from its newest checkpoint. No torch.

Samples are numbered by their place in the training order (data/order.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.order import hopped_ranges, take
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.lineage import read_lineage
from launcher.training.run_dir import checkpoints_of, refusing_unreachable
from launcher.training.run_parts import LEDGER, check_parts
from launcher.watch.metrics import read_rows
from parallel.checkpoint.manifest import DamagedCheckpoint, read_manifest
from parallel.checkpoint.places import is_remote, list_checkpoints

FIELDS = {"first_sample": int, "last_sample": int, "hopped": list, "trained": bool}


@dataclass(frozen=True)
class StepData:
    """One step's part of the training order: the samples [first, last] without the half-open ranges ``hopped``."""

    step: int
    first_sample: int
    last_sample: int
    hopped: tuple[tuple[int, int], ...]  # left out before or among them after a rollback
    trained: bool | None  # whether the optimizer advanced; None where the step is derived from a checkpoint

    @property
    def begin(self) -> int:
        """The place in the training order where this step began: one past the previous step's last sample."""
        return min([self.first_sample, *(first for first, _ in self.hopped)])

    @property
    def consumed(self) -> int:
        """The place in the training order where the next step begins."""
        return self.last_sample + 1

    @property
    def n_samples(self) -> int:
        """The size of the step's batch."""
        return self.consumed - self.begin - sum(stop - first for first, stop in self.hopped)

    def samples(self) -> np.ndarray:
        """The numbers of the step's samples, in the order in which they were dealt to micro-batches; int64."""
        return take(self.begin, self.n_samples, self.hopped)


@dataclass(frozen=True)
class Saved:
    """A checkpoint's record of the data consumed up to its step."""

    name: str
    step: int
    consumed: int
    skipped: list[tuple[int, int]]


def steps_of(run_path: Path, config: RunConfig) -> Iterator[StepData]:
    """The run's steps from the first one on, as they stand after rollbacks and resumptions.

    The steps of a branched run begin after its parent's checkpoint. Without a ledger they are derived from the newest
    checkpoint, if the config's batch sizes lead to the number of samples that it has consumed. Raises UserError where
    neither is there, or where the ledger contradicts itself or the newest checkpoint.
    """
    check_parts(run_path, LEDGER)
    path, saved, lineage = run_path / LEDGER, newest_saved(run_path), read_lineage(run_path)
    if path.exists() and path.stat().st_size:
        yield from _from_ledger(path, saved, 0 if lineage is None else lineage.step)
    elif lineage is not None:
        rule = "must be there, or have trained a step of its own"
        raise UserError([f"{path} {rule}: RUN={run_path} was branched from {lineage.run}; give that one"])
    elif saved is not None and saved.step:
        yield from _from_checkpoint(config, saved, path)
    else:
        raise UserError([f"RUN={run_path} must have trained a step, and has neither {LEDGER} nor a checkpoint of one"])


def newest_saved(run_path: Path) -> Saved | None:
    """The data record of the newest readable checkpoint; None where there is none.

    Checkpoints on an object store are read only where the run directory has no ledger.
    """
    location = checkpoints_of(run_path)
    if is_remote(location) and (run_path / LEDGER).exists():
        return None
    with refusing_unreachable("checkpoint.dir", location):
        folders = list_checkpoints(location)
    for folder in reversed(folders):
        try:
            manifest = read_manifest(folder)
        except DamagedCheckpoint:
            continue
        skipped = [(first, stop) for first, stop in manifest.scalars["skipped"]]
        return Saved(folder.name, manifest.step, manifest.scalars["consumed"], skipped)
    return None


def _from_ledger(path: Path, saved: Saved | None, step: int) -> Iterator[StepData]:
    """The ledger's rows from step ``step`` + 1 on. Raises UserError where a step or a sample is missing or repeated."""
    consumed = None if step else 0
    for _, row in read_rows(path):
        data = _parse(path, row)
        consumed = data.begin if consumed is None else consumed
        if data.step != step + 1 or data.begin != consumed:
            expected = f"step {step + 1} from sample {consumed} on"
            rule = f"must go on with {expected}, and its next row is of step {data.step} from sample {data.begin} on"
            raise UserError([f"{path} {rule}; put back the file as the run wrote it"])
        step, consumed = data.step, data.consumed
        if saved is not None and step == saved.step and consumed != saved.consumed:
            rule = f"must agree with {saved.name}, which had consumed {saved.consumed} samples, not {consumed}"
            raise UserError([f"{path}: step {step} {rule}; put back the run's own file"])
        yield data
    if saved is not None and step < saved.step:
        raise UserError([f"{path} ends at step {step}, before {saved.name}; put back the file as the run wrote it"])


def _parse(path: Path, row: dict[str, Any]) -> StepData:
    """One row of the ledger. Raises UserError where it is malformed."""
    ranges = row.get("hopped")
    is_right = all(type(row.get(name)) is kind for name, kind in FIELDS.items())
    is_right = is_right and all(
        isinstance(each, list) and len(each) == 2 and all(type(end) is int for end in each) for each in ranges or []
    )
    if is_right and 0 <= row["first_sample"] <= row["last_sample"] < 2**62:
        hopped = tuple((first, stop) for first, stop in row["hopped"])
        data = StepData(row["step"], row["first_sample"], row["last_sample"], hopped, row["trained"])
        if data.n_samples > 0 and all(0 <= first < stop <= data.consumed for first, stop in hopped):
            return data
    raise UserError([f"{path}: the row of step {row['step']} is not one that a run writes; put back the run's own"])


def _from_checkpoint(config: RunConfig, saved: Saved, path: Path) -> Iterator[StepData]:
    """The steps up to the checkpoint by the config's batch sizes.

    Raises UserError where these do not lead to the number of samples that the checkpoint has consumed.
    """
    found, consumed = [], 0
    for step in range(1, saved.step + 1):
        samples = take(consumed, config.train.batches.size_at(step), saved.skipped)
        first, last = int(samples[0]), int(samples[-1])
        hopped = tuple((a, b) for a, b in hopped_ranges(consumed, last + 1, saved.skipped))
        found.append(StepData(step, first, last, hopped, None))
        consumed = last + 1
    if consumed != saved.consumed:
        rule = f"has consumed {saved.consumed} samples where the config's batch sizes take {consumed}"
        raise UserError([f"{path} must be there, since {saved.name} {rule}: they changed within the run; put it back"])
    yield from found
