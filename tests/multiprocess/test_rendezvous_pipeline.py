"""What pipelines' ranks begin, in real runs, ends where a send ends only with its receive, as on NCCL."""

import random
from itertools import pairwise

import pytest

from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB
from rendezvous import stuck
from rendezvous_runs import STEPS, Drawn, queues

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


def test_training_sends_in_groups_of_two() -> None:
    """NCCL has a queue for each group: a receive that waits for the stage before holds up nothing of the one behind.

    Evaluation's transfers, and those by which torch begins, go in the group of all stages.
    """
    drawn = [Drawn(OneFOneB(), 4), Drawn(Interleaved(), 3), Drawn(ZBV(), 4)]
    for each, of_ranks in zip(drawn, queues(3, drawn), strict=True):
        assert stuck(of_ranks) == [], each
        pairs = {(0, 1), (1, 2)} | ({(0, 2)} if isinstance(each.pipeline, Interleaved) else set())
        for rank, queue in enumerate(of_ranks):
            transfers = [begun for entry in queue for begun in entry if begun.kind in ("send", "recv")]
            of_two = [begun for begun in transfers if len(begun.ranks) == 2]
            assert all(set(begun.ranks) == {rank, begun.peer} for begun in of_two), each
            assert {begun.ranks for begun in of_two} == {pair for pair in pairs if rank in pair}, each
            assert {begun.ranks for begun in transfers} - {begun.ranks for begun in of_two} == {(0, 1, 2)}, each
            assert len(of_two) >= 2 * STEPS * each.n_micro, each


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
