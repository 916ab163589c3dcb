"""Rounds of the matrices that ZeRO deals out: bounded, in order, each matrix once."""

import random
from typing import cast

import pytest

from parallel.zero.matrices import Matrix, at_most, joined
from parallel.zero.weights import HeldWeight

N_RANKS = 3
WEIGHT = cast(HeldWeight, None)


def draw(seed: int) -> list[Matrix]:
    """Matrices of which three ranks update parts."""
    draws = random.Random(seed)
    found = []
    for _ in range(40):
        counts = [draws.choice([0, draws.randrange(1, 60)]) for _ in range(N_RANKS)]
        owner = max(range(N_RANKS), key=lambda rank: counts[rank])
        found.append(Matrix(WEIGHT, 0, sum(counts), counts, owner))
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("at_once", [1, 64, 200, 10**9])
def test_no_rank_sends_or_owns_more_than_the_bound_or_the_largest_matrix(seed, at_once):
    matrices = draw(seed)
    rounds = list(at_most(matrices, N_RANKS, at_once))
    assert [matrix for each in rounds for matrix in each] == matrices
    for each, following in zip(rounds, [*rounds[1:], []], strict=True):
        assert each
        assert most(each) <= max(at_once, *(matrix.numel for matrix in each))
        if following:
            assert most([*each, following[0]]) > at_once, "a round ends where no more fits"


def most(matrices: list[Matrix]) -> int:
    """The most elements that a rank sends or owns."""
    sent = [sum(matrix.counts[rank] for matrix in matrices) for rank in range(N_RANKS)]
    owned = [sum(matrix.numel for matrix in matrices if matrix.owner == rank) for rank in range(N_RANKS)]
    return max(*sent, *owned)


def test_ranges_behind_each_other_are_one():
    """A stack of experts that stays is read and written by one kernel each."""
    assert joined([(0, 3), (3, 2), (6, 1), (7, 1), (5, 1)]) == [(0, 5), (6, 2), (5, 1)]
    assert joined([]) == []


def test_no_matrices_are_no_round():
    assert list(at_most([], N_RANKS, 1)) == []
