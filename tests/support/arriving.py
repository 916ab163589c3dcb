"""A stand-in for all-to-all in one process, whose rows arrive only when they are waited for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Axis

AXIS = Axis(0, 2, (0, 1), None)  # no group: nothing is sent


class Arriving:
    """Replaces all-to-all: the rows that are sent come back when they are waited for, and are NaN before.

    Rows sent to the other rank come back as if that rank had sent them, so each local expert stands for two. ``more``:
    rows that each rank sends to each expert in addition. ``never``: the number, from 1, of an exchange that never ends.
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
    """The handle of one asynchronous all-to-all."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self.wait = end
