"""Starting all ranks again after a crash: when that is worth it, and what the run's record says of it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.watch.metrics import read_metrics
from parallel.stop import STOPPED

FRUITLESS_STARTS = 3  # so many starts in a row that end without a newer checkpoint are a crash loop
NEVER_AGAIN = (2, STOPPED)  # exit codes after which ranks are not started again: the user's mistake, a request to stop


@dataclass(frozen=True)
class Restart:
    """Why and for which time all ranks were started again."""

    number: int
    allowed: int
    reason: str


class Restarts:
    """Decides after each start's end whether there is another."""

    def __init__(self, metrics: Path, allowed: int) -> None:
        self.metrics = metrics
        self.allowed = allowed
        self.made = 0
        self.newest = newest_checkpoint(metrics)
        self.fruitless = 0

    def next(self, exit_code: int, reason: str, *, stop_asked: bool) -> Restart | str:
        """The next start, or why there is none (in a line; empty where nothing needs to be said)."""
        newest = newest_checkpoint(self.metrics)
        self.fruitless = 0 if newest > self.newest else self.fruitless + 1
        self.newest = newest
        if exit_code in NEVER_AGAIN or stop_asked or self.allowed == 0:
            return ""
        if self.made == self.allowed:
            return f"no restart is left (--max-restarts {self.allowed})"
        if self.fruitless == FRUITLESS_STARTS:
            return (
                f"not started again: {FRUITLESS_STARTS} starts in a row ended before a checkpoint after step {newest}"
            )
        self.made += 1
        return Restart(self.made, self.allowed, reason)


def newest_checkpoint(metrics: Path) -> int:
    """The step of the last checkpoint that a metrics.jsonl tells of, written or resumed from; 0 where there is none."""
    if not metrics.exists():
        return 0
    told = ("checkpoint", "resume")  # a crash may come between a commit and its event
    return max((row["step"] for row in read_metrics(metrics) if row.get("event") in told), default=0)


def restart_by_torchrun(environment: Mapping[str, str] = os.environ) -> Restart | None:
    """What torchrun says of this start; None for the first one, and under any other launcher."""
    number = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if number == 0:
        return None
    allowed = int(environment.get("TORCHELASTIC_MAX_RESTARTS", number))
    return Restart(number, allowed, "torchrun started all ranks again; its log says why")
