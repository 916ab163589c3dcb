"""The most activation memory that a pipeline position holds for backward passes, at the worst moment of a step.

A layer keeps what its recomputation mode saves, once for each micro-batch in flight, and needs further memory while its
backward pass runs. By then the activations of later layers for that micro-batch are freed.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.schedule import Action, action_orders

LONG_ENOUGH = 4  # times pp: with more micro-batches a pipeline has no more in flight


class LayerHeld(NamedTuple):
    """Memory of one layer and micro-batch, in any unit (bytes, or elements of a token)."""

    kept: float  # from its forward to its backward pass
    working: float  # in addition, while its backward pass runs
    waiting: float = 0.0  # between the parts of a split backward pass: recomputed activations, and gradients


class Moment(NamedTuple):
    """A point of the schedule at which a position may hold the most."""

    in_flight: tuple[int, ...]  # micro-batches in flight of each of its stages, in order
    turning: int  # the stage, counted from the position's first, whose backward pass comes next; -1: none
    waiting: tuple[int, ...] = ()  # micro-batches of each stage whose weight gradients are still to be computed


Stages = tuple[tuple[LayerHeld, ...], ...]  # of one position


def most_held(stages: Sequence[Sequence[LayerHeld]], moments: Sequence[Moment]) -> float:
    """The most that a position with these stages holds at any of the moments."""
    return max(held_at(stages, each) for each in moments)


def held_at(stages: Sequence[Sequence[LayerHeld]], moment: Moment) -> float:
    """The most memory that is held during the backward pass that comes next at this moment.

    The pass goes through its stage's layers from the last to the first, and frees each one's activations. All other
    micro-batches in flight are held as a whole.
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
    """For each position, the moments that may hold the most: those that no other moment of the same stage exceeds."""
    return moments_in_order(pipeline, pp, min(n_micro_batches, LONG_ENOUGH * pp))


@lru_cache(maxsize=4096)
def moments_in_order(pipeline: PipelineConfig, pp: int, n_micro_batches: int) -> tuple[tuple[Moment, ...], ...]:
    """The moments of ``worst_moments``, found by walking the order of passes of the schedule."""
    if pp == 1:
        return ((Moment((1,), 0),),)
    ranks = stage_ranks(pipeline, pp)
    stages = [[stage for stage, rank in enumerate(ranks) if rank == position] for position in range(pp)]
    orders = action_orders(pipeline, pp, n_micro_batches)
    return tuple(moments_of(actions, own) for actions, own in zip(orders, stages, strict=True))


def moments_of(actions: Sequence[Action], own: Sequence[int]) -> tuple[Moment, ...]:
    """The moments of a position that has the stages ``own`` and executes ``actions``.

    A split backward pass frees its memory only after the second part. In the model's first stage torch computes the
    whole backward pass in that part.
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
    """Whether ``moment`` holds at least as much as ``other``, of the same next stage, and more of some stage."""
    mine, theirs = ((*each.in_flight, *each.waiting) for each in (moment, other))
    is_same_turn = moment.turning == other.turning
    return is_same_turn and mine != theirs and all(one >= two for one, two in zip(mine, theirs, strict=True))
