"""The state behind the terminal views of a run: the latest numbers, the loss curve so far, and the time left."""

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.training.batch_ramp import OF_ONE_SIZE, Batches
from launcher.watch.event_words import words_of
from launcher.watch.moe import load_keys

PACE_ROWS = 64  # updates over which the speed is measured; time of evaluations and checkpoints in between counts
TRACE_POINTS = 512
EVENTS_KEPT = 3


class Trace:
    """A series of any length, kept as at most TRACE_POINTS means of equally many neighboring values each."""

    def __init__(self) -> None:
        self.means: list[float] = []
        self.first: float | None = None
        self._group = 1  # values in one mean
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        """Appends a value; when TRACE_POINTS is reached, neighboring means are merged in pairs."""
        if self.first is None:
            self.first = value
        self._pending.append(value)
        if len(self._pending) == self._group:
            self.means.append(sum(self._pending) / self._group)
            self._pending.clear()
        if len(self.means) == TRACE_POINTS:
            self.means = [(a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2], strict=True)]
            self._group *= 2

    def rewind(self, n_values: int) -> None:
        """Removes all but the first ``n_values``, rounded down to whole groups."""
        self.means = self.means[: n_values // self._group]
        self._pending.clear()


class RunProgress:
    """The progress of a run, kept up to date from rows of metrics.jsonl that are passed to ``observe``."""

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        name: str,
        run_dir: Path,
        every_steps: int | None = None,
        batches: Batches = OF_ONE_SIZE,
    ) -> None:
        """``first_step`` is the first update of this process: 1, or the restored step + 1.

        ``every_steps``: only the rows of multiples of it, and of the first and last update, replace ``update``, the
        latest numbers to show; None: every update's.
        """
        self.total_steps = total_steps
        self.batches = batches
        self.first_step = first_step
        self.name = name
        self.run_dir = run_dir
        self.every_steps = every_steps
        self.step = first_step - 1
        self.update: dict[str, Any] = {}
        self.loads: dict[str, Any] = {}  # the latest shown update whose row has each expert's share
        self.evaluation: dict[str, Any] = {}
        self.checkpoint_step: int | None = None
        self.events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self.losses = Trace()
        self._moments: deque[tuple[float, int]] = deque(maxlen=PACE_ROWS)

    def observe(self, row: Mapping[str, Any]) -> None:
        """Takes in one row of any kind."""
        if "loss" in row:
            self.step = row["step"]
            has_shares = bool(load_keys(row))
            if has_shares and (self.is_shown(self.step) or not load_keys(self.update)):
                self.loads = dict(row)
            if self.is_shown(self.step):
                self.update = dict(row)
            self.losses.add(row["loss"])
            self._clock(row)
        elif "eval_loss" in row:
            self.evaluation = dict(row)
        elif row["event"] == "checkpoint":
            self.checkpoint_step = row["step"]
        else:
            self.events.append(event_text(row))

    def is_shown(self, step: int) -> bool:
        """Whether the numbers of this update are shown."""
        return step % (self.every_steps or 1) == 0 or step in (self.first_step, self.total_steps)

    def rewind(self, step: int) -> None:
        """Goes back to ``step``: losses and evaluations of later steps are removed, events stay."""
        self.step = step
        if self.evaluation.get("step", 0) > step:
            self.evaluation = {}
        self.losses.rewind(max(0, step - self.first_step + 1))
        self.first_step = min(self.first_step, step + 1)
        self._moments.clear()

    def _clock(self, row: Mapping[str, Any]) -> None:
        """Notes the time at which an update ended, and for the first one also its beginning, to leave out start-up."""
        now = time.monotonic()
        if not self._moments and "step_seconds" in row:
            self._moments.append((now - row["step_seconds"], self.step - 1))
        self._moments.append((now, self.step))

    def seconds_left(self) -> float | None:
        """Seconds to the last step at the sequences per second of the last PACE_ROWS updates; None before the first."""
        if not self._moments:
            return None
        (start, first), (now, last) = self._moments[0], self._moments[-1]
        if last <= first:
            return None
        behind, done, all_ = (self.batches.samples_in(step) for step in (first, last, self.total_steps))
        return (all_ - done) * (now - start) / (done - behind)


def event_text(row: Mapping[str, Any]) -> str:
    """An event row as one line of text: its step, and the event in words."""
    return f"step {row['step']}: {words_of(row)}"
