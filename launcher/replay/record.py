"""Reads the recorded steps of a run from metrics.jsonl and ledger.jsonl.

Where a step is recorded several times, its last row counts. Which start of the run made it, and which samples were left
out then, follows from the event rows before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.training.run_parts import LEDGER, METRICS, check_parts
from launcher.watch.metrics import NON_FINITE, read_rows

COMPARED = ("loss", "grad_norm", "lr", "tokens")  # of a row of metrics.jsonl
SAMPLES = ("first_sample", "last_sample", "hopped", "trained")  # of a row of ledger.jsonl
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Start:
    """The fields of a ``start`` event; None where an older run did not record one."""

    ranks: int | None = None
    config_sha256: str | None = None  # its first letters
    code_sha256: str | None = None
    nodes: str | None = None


@dataclass(frozen=True)
class Update:
    """One recorded step: its numbers, the start that made it, and the samples left out at that time."""

    numbers: dict[str, float]  # those of COMPARED that its row has
    start: Start
    skipped: Ranges  # samples that were left out, as half-open ranges


@dataclass
class Record:
    """All recorded steps by number, and the steps after which checkpoints were saved."""

    updates: dict[int, Update] = field(default_factory=dict)
    saved: dict[int, Ranges] = field(default_factory=dict)  # step -> samples left out by then
    samples: dict[int, dict[str, Any]] = field(default_factory=dict)  # step -> those of SAMPLES that the ledger has

    @property
    def last(self) -> int:
        """The last recorded step; 0 where there is none."""
        return max(self.updates, default=0)


def read_record(run_path: Path) -> Record:
    """The record of the run in ``run_path``. Raises UserError where it is missing or damaged. Changes nothing."""
    check_parts(run_path, METRICS, LEDGER)
    path = run_path / METRICS
    if not path.exists():
        raise UserError([f"RUN={run_path} holds no {METRICS}: no step of it is recorded; give a run that has trained"])
    record, start, skipped = Record(saved={0: ()}), Start(), Ranges()
    for _, row in read_rows(path):
        step, event = row["step"], row.get("event")
        if event == "start":
            start, skipped = _start_of(row), record.saved.get(step, ())
        elif event == "checkpoint":
            record.saved[step] = skipped
        elif event == "rollback":
            skipped = (*record.saved.get(step, ()), _range_of(row, path))
        elif event is None and "loss" in row:
            record.updates[step] = Update(_numbers_of(row, path), start, skipped)
    if (run_path / LEDGER).exists():
        for _, row in read_rows(run_path / LEDGER):
            record.samples[row["step"]] = {key: row[key] for key in SAMPLES if key in row}
    return record


def _start_of(row: Mapping[str, Any]) -> Start:
    ranks, texts = row.get("ranks"), [row.get(key) for key in ("config_sha256", "code_sha256", "nodes")]
    return Start(
        ranks if type(ranks) is int and ranks > 0 else None,
        *(each if isinstance(each, str) else None for each in texts),
    )


def _range_of(row: Mapping[str, Any], path: Path) -> tuple[int, int]:
    found = row.get("samples_left_out")
    if isinstance(found, list) and len(found) == 2 and all(type(each) is int and each >= 0 for each in found):
        return found[0], found[1]
    raise UserError([f"{path}: the rollback to step {row['step']} must say samples_left_out; put the file back"])


def _numbers_of(row: Mapping[str, Any], path: Path) -> dict[str, float]:
    numbers: dict[str, Any] = {
        key: NON_FINITE.get(row[key], row[key]) if isinstance(row[key], str) else row[key]
        for key in COMPARED
        if key in row
    }
    for key, value in numbers.items():
        if type(value) not in (int, float):
            raise UserError([f"{path}: step {row['step']}: {key} must be a number; put the file back"])
    return numbers
