"""Simulates when each pass of a pipeline's step begins and ends: the schedule's actions in order, without overlap.

tests/multiprocess/test_plan_bubble.py compares it with real processes whose passes only wait.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.schedule import Action, action_slots


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch's passes through one stage, and ``hop``, those of sending its hidden states on."""

    forward: float
    backward: float  # both halves: of inputs and of weights
    hop: float = 0.0


class Span(NamedTuple):
    """One pass at a position: when it begins and ends, in seconds since the step began."""

    action: Action
    begin: float
    end: float


@dataclass
class Simulated:
    """For each pipeline position: when its last pass ends, how long it computes in all, and its passes in order."""

    ends: list[float]
    busy: list[float]
    spans: list[list[Span]] = field(default_factory=list)

    @property
    def bubble(self) -> float:
        """The share of the passes' time in which the positions wait, from 0 to 1."""
        whole = max(self.ends)
        return 1 - sum(self.busy) / (whole * len(self.busy))


def simulate(config: PipelineConfig, passes: Sequence[Passes], n_micro_batches: int) -> Simulated:
    """A step's passes in time. All positions begin together; each runs an action as soon as its inputs have arrived.

    The results of two paired actions are sent after the second one, as torch does. Sending does not block the sender.
    """
    pp = len(passes)
    if pp == 1:
        spans = alone(passes[0], n_micro_batches)
        return Simulated([spans[-1].end], [spans[-1].end], [spans])
    ranks, slots = stage_ranks(config, pp), action_slots(config, pp, n_micro_batches)
    done: dict[Action, float] = {}
    now, places, spans = [0.0] * pp, [0] * pp, [list[Span]() for _ in slots]
    while any(place < len(each) for place, each in zip(places, slots, strict=True)):
        before = list(places)
        for position, own in enumerate(slots):
            while places[position] < len(own):
                found = slot_spans(own[places[position]], position, now[position], done, ranks, passes)
                if found is None:
                    break
                now[position] = found[-1].end
                spans[position] += found
                done.update({each.action: now[position] for each in found})
                places[position] += 1
        assert places != before, "the schedule's actions wait for each other"
    return Simulated(now, [sum(end - begin for _, begin, end in each) for each in spans], spans)


def slot_spans(
    slot: Sequence[Action],
    position: int,
    now: float,
    done: dict[Action, float],
    ranks: Sequence[int],
    passes: Sequence[Passes],
) -> list[Span] | None:
    """The spans of a slot's actions at a position, from ``now`` on; None where one of their inputs is not there yet."""
    found: list[Span] = []
    for action in slot:
        made = ChainMap({each.action: each.end for each in found}, done) if found else done
        ready = arrival(action, made, ranks, passes)
        if ready is None:
            return None
        begin = max(now, ready)
        now = begin + seconds_of(action, passes[position])
        found.append(Span(action, begin, now))
    return found


def alone(passes: Passes, n_micro_batches: int) -> list[Span]:
    """The passes without a pipeline, one micro-batch after another."""
    spans: list[Span] = []
    now = 0.0
    for number in range(n_micro_batches):
        for action in (Action("F", 0, number), Action("B", 0, number)):
            spans.append(Span(action, now, now + seconds_of(action, passes)))
            now = spans[-1].end
    return spans


def seconds_of(action: Action, passes: Passes) -> float:
    """Seconds of an action. The two parts of a split backward pass take half of it each: both have as many products.

    The first stage has no gradient to send back, so torch computes all of its backward pass in the weights' part.
    """
    match action.kind:
        case "F":
            return passes.forward
        case "B":
            return passes.backward
        case "I" if action.stage == 0:
            return 0.0
        case "W" if action.stage == 0:
            return passes.backward
        case _:
            return passes.backward / 2


def arrival(
    action: Action, done: Mapping[Action, float], ranks: Sequence[int], passes: Sequence[Passes]
) -> float | None:
    """The moment at which an action's input is at its position; None where it is not computed yet."""
    kind, stage, number = action
    if kind == "W":
        return done.get(Action("I", stage, number))
    last = len(ranks) - 1
    if kind == "F":
        return 0.0 if stage == 0 else sent(done.get(Action("F", stage - 1, number)), stage - 1, stage, ranks, passes)
    if stage == last:
        return done.get(Action("F", stage, number))
    for whole_or_part in ("B", "I"):
        made = done.get(Action(whole_or_part, stage + 1, number))
        if made is not None:
            return sent(made, stage + 1, stage, ranks, passes)
    return None


def sent(made: float | None, source: int, target: int, ranks: Sequence[int], passes: Sequence[Passes]) -> float | None:
    """The moment at which a stage's result, computed at ``made``, is at another stage's position."""
    if made is None or ranks[source] == ranks[target]:
        return made
    return made + passes[ranks[source]].hop
