"""Chooses recomputation modes for a pipeline position's layers, so that their activations stay within a limit.

A greedy search: modes with the most memory saved for their work are taken layer by layer, and where room is left at the
end, lighter ones are taken back. The recomputed work is the least, or exceeds it by less than one layer's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from launcher.closed_form.held import LayerHeld, Moment, held_at, most_held


class Option(NamedTuple):
    """A recomputation mode of a layer: the memory that it holds, and the work that it recomputes."""

    held: LayerHeld
    work: float


@dataclass
class Group:
    """Layers of one stage that have the same options, and how many of them take each option."""

    stage: int
    layers: list[int]  # places within the stage, in order
    options: Sequence[Option]
    counts: list[int]

    def taken(self) -> Iterator[tuple[int, int]]:
        """(layer, option) for each layer. The first layers take the options that keep the least.

        The backward pass reaches these when the activations of later layers are gone, so there is room to recompute.
        """
        heaviest = sorted(range(len(self.options)), key=lambda each: self.options[each].held.kept)
        options = [option for option in heaviest for _ in range(self.counts[option])]
        return zip(self.layers, options, strict=True)

    def move(self, count: int, source: int, target: int) -> None:
        """Moves ``count`` layers from option ``source`` to option ``target``."""
        self.counts[source] -= count
        self.counts[target] += count


@dataclass(frozen=True)
class Chosen:
    """The index of each layer's option, by stage, and the most memory that is held at any moment."""

    options: list[list[int]]
    held: float


def choose(stages: Sequence[Sequence[Sequence[Option]]], moments: Sequence[Moment], limit: float) -> Chosen:
    """The chosen options of a pipeline position. ``stages``: the options of each layer, by stage.

    The first option of each layer recomputes nothing. Where no choice stays within ``limit``, the one that holds the
    least of those tried is returned.
    """
    groups = groups_of(stages)
    least = chosen = chosen_by(groups, stages, moments)
    while chosen.held > limit:
        best = best_move(groups, worst_of(chosen, stages, moments))
        if best is None:
            return least
        group, source, target = best
        move_fewest(group, source, target, lambda: chosen_by(groups, stages, moments).held <= limit)
        chosen = chosen_by(groups, stages, moments)
        least = min(least, chosen, key=lambda each: each.held)
    for group, source, target in lighter_moves(groups):
        move_most(group, source, target, lambda: chosen_by(groups, stages, moments).held <= limit)
    return chosen_by(groups, stages, moments)


def groups_of(stages: Sequence[Sequence[Sequence[Option]]]) -> list[Group]:
    """The layers grouped by stage and options; all take their first option."""
    found: dict[tuple[int, tuple[Option, ...]], Group] = {}
    for stage, layers in enumerate(stages):
        for place, options in enumerate(layers):
            group = found.setdefault((stage, tuple(options)), Group(stage, [], options, [0] * len(options)))
            group.layers.append(place)
            group.counts[0] += 1
    return list(found.values())


def chosen_by(
    groups: Sequence[Group], stages: Sequence[Sequence[Sequence[Option]]], moments: Sequence[Moment]
) -> Chosen:
    """The options that the groups' layers take now, and the most memory that these hold."""
    options = [[0] * len(layers) for layers in stages]
    for group in groups:
        for place, option in group.taken():
            options[group.stage][place] = option
    return Chosen(options, most_held(held_by(options, stages), moments))


def held_by(options: list[list[int]], stages: Sequence[Sequence[Sequence[Option]]]) -> list[list[LayerHeld]]:
    """What each layer holds under the options with these indices."""
    return [
        [layer[option].held for layer, option in zip(layers, taken, strict=True)]
        for layers, taken in zip(stages, options, strict=True)
    ]


def worst_of(chosen: Chosen, stages: Sequence[Sequence[Sequence[Option]]], moments: Sequence[Moment]) -> Moment:
    """The moment at which these options hold the most."""
    held = held_by(chosen.options, stages)
    return max(moments, key=lambda each: held_at(held, each))


def best_move(groups: Sequence[Group], moment: Moment) -> tuple[Group, int, int] | None:
    """The move of one layer that saves the most memory at that moment for its added work, as (group, source, target).

    None where no move saves any.
    """
    best, best_rate = None, 0.0
    for group in groups:
        for source, target in pairs(group):
            before, after = group.options[source], group.options[target]
            saved = moment.in_flight[group.stage] * (before.held.kept - after.held.kept)
            if saved > 0:
                rate = saved / max(after.work - before.work, 1e-9)
                if rate > best_rate:
                    best, best_rate = (group, source, target), rate
    return best


def lighter_moves(groups: Sequence[Group]) -> list[tuple[Group, int, int]]:
    """The moves (group, source, target) by which a layer recomputes less, those that save the most work first."""
    found = [(group, *pair) for group in groups for pair in pairs(group)]
    gains = [
        (group.options[source].work - group.options[target].work, n) for n, (group, source, target) in enumerate(found)
    ]
    return [found[n] for gain, n in sorted(gains, key=lambda each: -each[0]) if gain > 0]


def pairs(group: Group) -> Iterator[tuple[int, int]]:
    """(option that some layers take, another option) of the group, in all combinations."""
    for source, count in enumerate(group.counts):
        if count:
            yield from ((source, target) for target in range(len(group.options)) if target != source)


def move_fewest(group: Group, source: int, target: int, is_enough: Callable[[], bool]) -> None:
    """Moves the fewest layers with which ``is_enough`` is true, or all where that is never so."""
    count = group.counts[source]
    group.move(count, source, target)
    if not is_enough():
        return
    low, high = 0, count  # ``high`` are enough, ``low`` are not
    while high - low > 1:
        middle = (low + high) // 2
        group.move(high - middle, target, source)
        if is_enough():
            high = middle
        else:
            low = middle
            group.move(high - middle, source, target)


def move_most(group: Group, source: int, target: int, is_legal: Callable[[], bool]) -> None:
    """Moves the most layers with which ``is_legal`` is true, possibly none."""
    low, high = 0, group.counts[source]
    while low < high:
        middle = (low + high + 1) // 2
        group.move(middle, source, target)
        legal = is_legal()
        group.move(middle, target, source)
        low, high = (middle, high) if legal else (low, middle - 1)
    group.move(low, source, target)
