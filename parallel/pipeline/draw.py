"""A pipeline schedule drawn as text, with its bubble and its peak of activations.

The order of actions is that of a real run (tests compare them). Times are a model: a rank does one thing at a time,
transfers take no time, and each action takes as long as ``Durations`` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.pipeline.config import PipelineConfig, chunks
from parallel.pipeline.schedule import Action, action_orders


@dataclass(frozen=True)
class Durations:
    """How long one stage's passes take, in any unit: forward, and backward by inputs and by weights.

    A whole backward pass takes the sum of its two parts.
    """

    forward: int = 1
    inputs: int = 1
    weights: int = 1

    def of(self, action: Action) -> int:
        """The duration of the action."""
        return {"F": self.forward, "I": self.inputs, "W": self.weights, "B": self.inputs + self.weights}[action.kind]


@dataclass(frozen=True)
class Span:
    """An action with the times at which it starts and ends."""

    action: Action
    start: int
    end: int


def timeline(orders: Sequence[Sequence[Action]], durations: Durations) -> list[list[Span]]:
    """The times of each rank's actions, each as early as the rank's order and the arrival of its input allow.

    ``orders``: each rank's actions in order. Fails if the ranks would wait for each other in a circle.
    """
    last_stage = max(action.stage for order in orders for action in order)
    ended: dict[tuple[str, int, int], int] = {}  # ("F" or "B", stage, micro-batch) -> when its result is ready
    spans: list[list[Span]] = [[] for _ in orders]
    waiting = True
    while waiting:
        waiting = False
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                arrival = 0 if (needed := _needed(action, last_stage)) is None else ended.get(needed)
                if arrival is None:
                    break
                start = max(arrival, spans[rank][-1].end if spans[rank] else 0)
                span = Span(action, start, start + durations.of(action))
                spans[rank].append(span)
                if action.kind != "W":
                    ended["F" if action.kind == "F" else "B", action.stage, action.micro_batch] = span.end
                waiting = True
    assert [len(done) for done in spans] == [len(order) for order in orders], "ranks wait for each other in a circle"
    return spans


def _needed(action: Action, last_stage: int) -> tuple[str, int, int] | None:
    """The pass whose result the action needs, as a key of ``timeline``'s ends; None for the first stage's forward."""
    stage, micro_batch = action.stage, action.micro_batch
    match action.kind:
        case "F":
            return ("F", stage - 1, micro_batch) if stage > 0 else None
        case "B" | "I":
            return ("B", stage + 1, micro_batch) if stage < last_stage else ("F", stage, micro_batch)
        case "W":
            return ("B", stage, micro_batch)


def bubble_fraction(spans: Sequence[Sequence[Span]]) -> float:
    """The share of all ranks' time, from the first action to the last, in which a rank waits."""
    end = max(span.end for row in spans for span in row)
    busy = sum(span.end - span.start for row in spans for span in row)
    return 1.0 - busy / (end * len(spans))


def peak_activations(order: Sequence[Action]) -> int:
    """The largest number of stage activations (of one micro-batch in one stage) that the rank holds at once.

    They are held from the forward pass to the end of the backward pass; where that is split, to the end of the weights'
    part.
    """
    alive = peak = 0
    for action in order:
        alive += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        peak = max(peak, alive)
    return peak


def summary(config: PipelineConfig, pp: int, n_micro_batches: int) -> str:
    """One line with the schedule's bubble and each rank's peak of activations.

    The peak is in micro-batches through all of a rank's layers: its stage activations divided by its stages.
    """
    orders = action_orders(config, pp, n_micro_batches)
    bubble = bubble_fraction(timeline(orders, Durations()))
    peaks = ", ".join(f"{peak_activations(order) / chunks(config):g}" for order in orders)
    name = config.name if chunks(config) == 1 else f"{config.name} ({chunks(config)} stages a rank)"
    return (
        f"{name}: pp={pp}, {n_micro_batches} micro-batches: bubble {bubble:.1%}, "
        f"peak activations of ranks 0 to {pp - 1}: {peaks} micro-batches"
    )


def draw_text(config: PipelineConfig, pp: int, n_micro_batches: int) -> str:
    """The summary, and below it a row for each rank with one cell for each unit of time.

    "2F5" is the forward pass of micro-batch 5 in stage 2; B is a whole backward pass, I that of inputs only and W that
    of weights only. A dot is a unit of time in which the rank waits.
    """
    spans = timeline(action_orders(config, pp, n_micro_batches), Durations())
    width = 1 + max(len(_label(span.action)) for row in spans for span in row)
    lines = [summary(config, pp, n_micro_batches)]
    for rank, row in enumerate(spans):
        cells, now = "", 0
        for span in row:
            cells += (
                ".".ljust(width) * (span.start - now)
                + _label(span.action).ljust(width * (span.end - span.start), "-")[:-1]
                + " "
            )
            now = span.end
        lines.append(f"rank {rank:<3} {cells}".rstrip())
    return "\n".join(lines) + "\n"


def _label(action: Action) -> str:
    return f"{action.stage}{action.kind}{action.micro_batch}"
