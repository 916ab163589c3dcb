"""What a pipeline waits, by its schedule's own order of passes."""

from collections.abc import Sequence
from functools import lru_cache

from launcher.estimate.order import Passes, simulate
from parallel.pipeline.config import PipelineConfig, chunks

LONG_ENOUGH = 4  # times pp: with more micro-batches a pipeline waits no longer
PASSES = (1.0, 2.0)  # of a forward and a backward pass
PARTS = 16  # of the slowest position's seconds, to which the others' are rounded: layouts nearly alike are one


def waits_of(schedule: PipelineConfig, n_micro_batches: int, seconds: Sequence[float]) -> float:
    """In micro-batches of the slowest position; ``seconds``: of one micro-batch at each position, in their order.

    The slowest position's neighbours decide how soon it begins and how long it is waited for: among others of a third
    of its work it waits a third as long.
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
