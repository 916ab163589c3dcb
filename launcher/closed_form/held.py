"""What a pipeline position holds of its layers for the backward passes to come, at the worst moment of a step.

A layer leaves what its mode of recomputation keeps, once for each micro-batch in flight, and needs room to work while
its backward pass runs. By then what the layers behind it had left of that micro-batch is gone.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.schedule import Action, action_orders

LONG_ENOUGH = 4  # times pp: with more micro-batches a pipeline has no more in flight


class LayerHeld(NamedTuple):
    """Bytes, or whatever else is added up, of one layer and micro-batch."""

    kept: float  # from its forward to its backward pass
    working: float  # besides, while its backward pass runs
    waiting: float = 0.0  # between the parts of a split one: all that was computed again, and gradients


class Moment(NamedTuple):
    """A point of the schedule at which a position holds as much as it ever does."""

    in_flight: tuple[int, ...]  # micro-batches, of each of its stages in order
    turning: int  # the stage, counted from the position's first, whose backward pass comes next; -1: no matter which
    waiting: tuple[int, ...] = ()  # micro-batches whose weights' gradients are put off, of each stage


Stages = tuple[tuple[LayerHeld, ...], ...]  # of one position


def most_held(stages: Sequence[Sequence[LayerHeld]], moments: Sequence[Moment]) -> float:
    """What a position of these stages holds at the worst of the moments."""
    return max(held_at(stages, each) for each in moments)


def held_at(stages: Sequence[Sequence[LayerHeld]], moment: Moment) -> float:
    """What is held in the backward pass that comes next: one micro-batch less of its stage, and the most of that one's.

    The pass goes through the layers from the last to the first.
    """
    others = sum(
        (count - (number == moment.turning)) * sum(each.kept for each in layers)
        for number, (count, layers) in enumerate(zip(moment.in_flight, stages, strict=True))
    )
    others += sum(
        count * sum(each.waiting for each in layers)
        for count, layers in zip(moment.waiting, stages, strict=len(moment.waiting) > 0)
    )
    kept = most = 0.0
    for layer in stages[moment.turning] if moment.turning >= 0 else ():
        kept += layer.kept
        most = max(most, kept + layer.working)
    return others + most


def worst_moments(pipeline: PipelineConfig, pp: int, n_micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    """By position: the moments of which no other one of the same turn has as much in flight of every stage."""
    return moments_in_order(pipeline, pp, min(n_micro_batches, LONG_ENOUGH * pp))


@lru_cache(maxsize=4096)
def moments_in_order(pipeline: PipelineConfig, pp: int, n_micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    """As ``worst_moments``, by the schedule's own order of passes."""
    if pp == 1:
        return ((Moment((1,), 0),),)
    ranks = stage_ranks(pipeline, pp)
    stages = [[stage for stage, rank in enumerate(ranks) if rank == position] for position in range(pp)]
    orders = action_orders(pipeline, pp, n_micro_batches)
    return tuple(moments_of(actions, own) for actions, own in zip(orders, stages, strict=True))


def moments_of(actions: Sequence[Action], own: Sequence[int]) -> tuple[Moment, ...]:
    """Those of a position that holds the stages ``own``.

    A pass in two parts lets go after the second; of the model's first stage torch leaves all to that.
    """
    now, waiting, found = [0] * len(own), [0] * len(own), dict[Moment, None]()
    for action in actions:
        place = own.index(action.stage)
        is_whole = action.kind == "B" or (action.kind == "W" and action.stage == 0)
        if action.kind == "F":
            now[place] += 1
        elif is_whole or (action.kind == "I" and action.stage > 0):
            found[Moment(tuple(now), place, tuple(waiting))] = None
            now[place] -= 1
            waiting[place] += not is_whole
            if not is_whole:  # by its end all layers of the stage wait
                found[Moment(tuple(now), -1, tuple(waiting))] = None
        elif action.kind == "W":
            waiting[place] -= 1
    return tuple(each for each in found if not any(is_above(other, each) for other in found))


def is_above(moment: Moment, other: Moment) -> bool:
    """Whether a moment has as much of every stage as another one of the same turn, and more of some."""
    mine, theirs = ((*each.in_flight, *each.waiting) for each in (moment, other))
    is_same_turn = moment.turning == other.turning
    return is_same_turn and mine != theirs and all(one >= two for one, two in zip(mine, theirs, strict=True))
