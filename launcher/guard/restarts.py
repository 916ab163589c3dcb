"""Restarts of all ranks after a crash: whether another one is made, and its description for the run's record."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from parallel.checkpoint.places import open_store
from parallel.checkpoint.store import step_of
from parallel.processes.environment import number
from parallel.processes.stop import STOPPED

FRUITLESS_STARTS = 3  # so many starts in a row that end without a newer checkpoint are a crash loop
NEVER_AGAIN = (2, STOPPED)  # exit codes after which ranks are not started again: the user's mistake, a request to stop


@dataclass(frozen=True)
class Restart:
    """One restart of all ranks: its number, from 1, how many are allowed, and the failure before it."""

    number: int
    allowed: int
    reason: str


class Restarts:
    """Decides after each failed start of local processes whether they are started again."""

    def __init__(self, checkpoints: str, allowed: int) -> None:
        self.checkpoints = checkpoints
        self.allowed = allowed
        self.made = 0
        self.newest = newest_checkpoint(checkpoints) if allowed else 0
        self.fruitless = 0

    def next(self, exit_code: int, reason: str, *, stop_asked: bool) -> Restart | str:
        """The next start, or why there is none (in a line; empty where nothing needs to be said)."""
        if exit_code in NEVER_AGAIN or stop_asked or self.allowed == 0:
            return ""
        newest = newest_checkpoint(self.checkpoints)
        self.fruitless = 0 if newest > self.newest else self.fruitless + 1
        self.newest = newest
        if self.made == self.allowed:
            return f"no restart is left (--max-restarts {self.allowed})"
        if self.fruitless == FRUITLESS_STARTS:
            return (
                f"not started again: {FRUITLESS_STARTS} starts in a row ended before a checkpoint after step {newest}"
            )
        self.made += 1
        return Restart(self.made, self.allowed, reason)


def newest_checkpoint(location: str) -> int:
    """The step of the newest checkpoint in a folder or at a URL; 0 where there is none."""
    names = open_store(location).names()
    return step_of(names[-1]) or 0 if names else 0


def restart_by_torchrun(environment: Mapping[str, str] = os.environ) -> Restart | None:
    """The restart that torchrun made, by its environment variables; None for a first start or another launcher."""
    count = number("TORCHELASTIC_RESTART_COUNT", environment, default=0)
    if count == 0:
        return None
    allowed = number("TORCHELASTIC_MAX_RESTARTS", environment, default=count)
    return Restart(count, allowed, "torchrun started all ranks again; its log says why")
