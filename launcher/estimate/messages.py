"""Overlap of expert dispatch with computation: which operations each message runs beside, and how much that hides."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from launcher.trace.ops import Op
from launcher.trace.roofline import Rates, least_seconds
from parallel.collectives import RowExchange


@dataclass
class Messages:
    """The messages of expert dispatch among a rank's operations, noted by ``watch`` while these are recorded."""

    ops: Sequence[Op] = ()  # the recorder's list, which grows
    waits: list[tuple[int, int]] = field(default_factory=list)  # places in ops of a message, and of what waits for it
    under_way: dict[int, int] = field(default_factory=dict)

    def watch(self, exchange: RowExchange, moment: Literal["begun", "waited for"]) -> None:
        """Notes where a message begins or is waited for. RowExchange calls it; the last operation is the message."""
        if moment == "begun":
            self.under_way[id(exchange)] = len(self.ops) - 1
        else:
            self.waits.append((self.under_way.pop(id(exchange)), len(self.ops)))


def hide(ops: Sequence[Op], waits: Sequence[tuple[int, int]], rates: Rates) -> list[Op]:
    """The operations, with the share of each message's time that computation hides set as its work's ``hidden``.

    ``waits`` are pairs of places in ``ops``: a message, and the operation before which it is waited for. Messages are
    sent one after another, each when it is begun and those before have arrived; everything else is computed in order,
    as fast as without messages. A wait counts with the message that is waited for. Where that is also a wait for
    messages sent before, the share is below zero, and those, waited for later, are hidden completely.
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
