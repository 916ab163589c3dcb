"""All-to-all of rows without other ranks, whose rows come when they are waited for and not before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Axis

AXIS = Axis(0, 2, (0, 1), None)  # no group: nothing is sent


class Arriving:
    """In place of all-to-all: the rows that are sent come back when they are waited for, and are not numbers before.

    What is sent to the other rank comes as if it were that one's, so each of our experts stands for two. ``more``: rows
    that each rank sends to each expert, besides ours. ``never``: the number of an exchange, from 1, that nobody ends.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, more: int = 0, never: int | None = None) -> None:
        self.events: list[str] = []
        self.more, self.never = more, never
        self.n_begun = 0
        monkeypatch.setattr(dist, "all_to_all_single", self.exchange)

    def exchange(self, result: Tensor, given: Tensor, *sizes: Any, group: Any, async_op: bool = False) -> Any:
        came = given[torch.arange(len(result)) % max(1, len(given))].clone()
        if not given.is_floating_point():
            came += self.more
        if not async_op:
            result.copy_(came)
            return None
        self.n_begun += 1
        number = self.n_begun
        result.fill_(torch.nan)
        self.events.append(f"begin {number}")

        def end() -> None:
            if number != self.never:
                result.data.copy_(came)  # as a collective writes: autograd counts no change
            self.events.append(f"wait {number}")

        return Work(end)


class Work:
    """One all-to-all under way."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self.wait = end
