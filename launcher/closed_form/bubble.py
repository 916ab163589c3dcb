"""The idle time of a pipeline (its bubble), simulated with the order of passes of its schedule."""

from collections.abc import Sequence
from functools import lru_cache

from launcher.estimate.order import Passes, simulate
from parallel.pipeline.config import PipelineConfig, chunks

LONG_ENOUGH = 4  # times pp: with more micro-batches a pipeline waits no longer
PASSES = (1.0, 2.0)  # relative times of a forward and a backward pass
PARTS = 16  # positions' times are rounded to such parts of the slowest one's, so that similar layouts share a result


def waits_of(schedule: PipelineConfig, n_micro_batches: int, seconds: Sequence[float]) -> float:
    """The pipeline's idle time in a step, in units of a micro-batch's time at the slowest position.

    ``seconds``: the time of one micro-batch at each position, in order. The other positions decide how soon the slowest
    one begins and how long it is waited for: if they take a third of its time, it waits a third as long.
    """
    if len(seconds) == 1:
        return 0.0
    slowest = max(seconds)
    parts = tuple(round(PARTS * each / slowest) for each in seconds)
    return _waits(schedule, min(n_micro_batches, LONG_ENOUGH * len(seconds)), parts)


@lru_cache(maxsize=4096)
def _waits(schedule: PipelineConfig, n_micro_batches: int, parts: tuple[int, ...]) -> float:
    n_stages = chunks(schedule)
    shares = [each / PARTS / n_stages for each in parts]
    order = simulate(schedule, [Passes(*(share * each for each in PASSES)) for share in shares], n_micro_batches)
    return max(order.ends) / sum(PASSES) - n_micro_batches
