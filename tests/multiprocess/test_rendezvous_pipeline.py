"""What pipelines' ranks begin, in real runs, ends where a send ends only with its receive, as on NCCL."""

import random
from itertools import pairwise

import pytest

from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB
from rendezvous import stuck
from rendezvous_runs import Drawn, queues

PIPELINES = (OneFOneB(), Interleaved(), Interleaved(n_chunks=3), ZBV(), DualPipeV())
EACH = 2  # numbers of micro-batches of a schedule


def drawn_for(pp: int) -> list[Drawn]:
    """Some numbers of micro-batches for each schedule, other ones for each ``pp``."""
    draws = random.Random(pp)
    found = []
    for pipeline in PIPELINES:
        legal = [each for n in range(1, 4 * pp + 1) if (each := Drawn(pipeline, n)).is_legal(pp)]
        found += draws.sample(legal, EACH)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_training_and_evaluation_end(pp: int) -> None:
    drawn = drawn_for(pp)
    for each, of_ranks in zip(drawn, queues(pp, drawn), strict=True):
        assert all(any(begun.kind == "send" for entry in queue for begun in entry) for queue in of_ranks), each
        assert stuck(of_ranks) == [], each


def test_planted_faults_wait_without_end() -> None:
    """Evaluation's transfers one by one: two ranks hold stages 0, 2 and 1, 3. And two entries of a rank swapped."""
    ((first, second),) = queues(2, [Drawn(Interleaved(), 4)], "one by one")
    assert stuck([first, second]) != []
    ((first, second),) = queues(2, [Drawn(Interleaved(), 4)])
    assert stuck([first, second]) == []
    transfers = [number for number, entry in enumerate(second) if len(entry) == 1]
    one, other = next((one, other) for one, other in pairwise(transfers) if second[one] != second[other])
    second[one], second[other] = second[other], second[one]
    assert stuck([first, second]) != []
