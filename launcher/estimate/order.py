"""When each pass of a pipeline's step begins and ends: the schedule's actions in its own order, nothing overlapped."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.schedule import Action, action_orders


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch through one stage of a position. Hidden states take ``hop`` to another position."""

    forward: float
    backward: float  # both halves: of inputs and of weights
    hop: float = 0.0


@dataclass
class Simulated:
    """By position: when its last pass ends, and how long it computes in all."""

    ends: list[float]
    busy: list[float]

    @property
    def bubble(self) -> float:
        """The share of the passes' time in which the positions wait, from 0 to 1."""
        whole = max(self.ends)
        return 1 - sum(self.busy) / (whole * len(self.busy))


def simulate(config: PipelineConfig, passes: Sequence[Passes], n_micro_batches: int) -> Simulated:
    """A step's passes. Positions begin together; each takes its actions one by one, when what they need has arrived."""
    pp = len(passes)
    if pp == 1:
        busy = n_micro_batches * (passes[0].forward + passes[0].backward)
        return Simulated([busy], [busy])
    ranks, orders = stage_ranks(config, pp), action_orders(config, pp, n_micro_batches)
    done: dict[Action, float] = {}
    now, busy, places = [0.0] * pp, [0.0] * pp, [0] * pp
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for position, order in enumerate(orders):
            while places[position] < len(order):
                action = order[places[position]]
                ready = arrival(action, done, ranks, passes)
                if ready is None:
                    break
                taken = seconds_of(action, passes[position])
                now[position] = max(now[position], ready) + taken
                busy[position] += taken
                done[action] = now[position]
                places[position] += 1
        assert places != before, "the schedule's actions wait for each other"
    return Simulated(now, busy)


def seconds_of(action: Action, passes: Passes) -> float:
    """What an action takes; of a backward pass in two parts, each half: torch computes as many products in both."""
    match action.kind:
        case "F":
            return passes.forward
        case "B":
            return passes.backward
        case _:
            return passes.backward / 2


def arrival(action: Action, done: dict[Action, float], ranks: Sequence[int], passes: Sequence[Passes]) -> float | None:
    """When what an action needs is there; None where it is not made yet."""
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
    """When what a stage made is at another one's position."""
    if made is None or ranks[source] == ranks[target]:
        return made
    return made + passes[ranks[source]].hop
