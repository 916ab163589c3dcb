"""Tokens on their way to experts beside computation: which operations each message runs beside, and what that hides."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.trace.ops import Op
from launcher.trace.roofline import Rates, least_seconds
from parallel.collectives import RowExchange


@dataclass
class Messages:
    """Filled while a rank's operations are recorded: places in ``ops``, from which on messages are waited for."""

    ops: Sequence[Op] = ()  # which the recorder fills
    waits: list[tuple[int, int]] = field(default_factory=list)  # a message's own place, and that of its wait
    under_way: dict[int, int] = field(default_factory=dict)

    def watch(self, exchange: RowExchange, moment: Literal["begun", "waited for"]) -> None:
        """As RowExchange calls it: what was recorded last is the message."""
        if moment == "begun":
            self.under_way[id(exchange)] = len(self.ops) - 1
        else:
            self.waits.append((self.under_way.pop(id(exchange)), len(self.ops)))


def hide(ops: Sequence[Op], waits: Sequence[tuple[int, int]], rates: Rates) -> list[Op]:
    """The operations, of whose messages that are not waited for at once a share is hidden.

    Messages go one after another, each when it is given and those before have arrived; all else is computed in order,
    as fast as without them. What is waited for counts with the message that is: one of which the wait is also for those
    before it has a share below zero, and they, waited for later, are hidden whole.
    """
    waits_at: dict[int, list[int]] = {}
    for message, place in waits:
        waits_at.setdefault(place, []).append(message)
    found, messages = list(ops), {message for message, _ in waits}
    arrivals: dict[int, float] = {}
    now = wire = 0.0
    for place in range(len(ops) + 1):
        for message in waits_at.get(place, ()):
            stall, seconds = max(0.0, arrivals[message] - now), least_seconds(ops[message], rates)[0]
            now += stall
            if seconds:
                work = replace(ops[message].work, hidden=1 - stall / seconds)
                found[message] = replace(ops[message], work=work)
        if place == len(ops):
            break
        seconds = least_seconds(ops[place], rates)[0]
        if place in messages:
            wire = arrivals[place] = max(now, wire) + seconds
        else:
            now += seconds
    return found
