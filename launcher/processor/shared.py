"""Simulates a pipeline's step where more processes run than there are cores: those that compute share the cores."""

from collections.abc import Callable, Sequence

from launcher.estimate.order import Passes, arrival, seconds_of
from parallel.pipeline.config import PipelineConfig, stage_ranks
from parallel.pipeline.schedule import Action, action_slots

SAME = 1e-12


def shared_seconds(
    config: PipelineConfig, passes: Sequence[Passes], n_micro_batches: int, rate_of: Callable[[int], float]
) -> float:
    """Seconds until the last position has ended its last pass.

    A process that waits takes no core. ``rate_of`` gives, for a number of computing positions, each one's share of a
    core.
    """
    pp = len(passes)
    owners = stage_ranks(config, pp)
    orders = [[each for slot in slots for each in slot] for slots in action_slots(config, pp, n_micro_batches)]
    done: dict[Action, float] = {}
    places, left, now = [0] * pp, [0.0] * pp, 0.0
    begun = [False] * pp
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        later = []
        for position, order in enumerate(orders):
            if not begun[position] and places[position] < len(order):
                ready = arrival(order[places[position]], done, owners, passes)
                if ready is not None and ready <= now + SAME:
                    begun[position] = True
                    left[position] = seconds_of(order[places[position]], passes[position])
                elif ready is not None:
                    later.append(ready - now)
        busy = [position for position in range(pp) if begun[position]]
        rate = rate_of(len(busy)) if busy else 1.0
        assert busy or later, "the schedule's actions wait for each other"
        ahead = min([*later, *(left[position] / rate for position in busy)])
        now += ahead
        for position in busy:
            left[position] -= ahead * rate
            if left[position] <= SAME:
                done[orders[position][places[position]]] = now
                places[position] += 1
                begun[position] = False
    return now
