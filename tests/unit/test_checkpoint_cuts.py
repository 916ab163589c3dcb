"""What all ranks own, said once: nothing is lost by it, and nothing that is wrong is hidden."""

import math
import random

import pytest
import torch

from parallel.checkpoint.boxes import Box, coverage_error
from parallel.checkpoint.cuts import (
    Owned,
    ShardIndex,
    elements_by_shard,
    every_piece_of,
    fault_of,
    merge,
    pack,
    pieces_within,
    runs_of,
)
from parallel.checkpoint.schema import Piece

KINDS = ("weight", "exp_avg")
SHAPES = {"a": [6, 4, 5], "b": [7], "c": []}


def dealt(draw: random.Random, n_ranks: int) -> list[list[Owned]]:
    """All elements of all tensors, in halves where a first dim is even, cut anywhere and dealt to the ranks."""
    ranks: list[list[Owned]] = [[] for _ in range(n_ranks)]
    for name, shape in SHAPES.items():
        halves = 2 if shape and shape[0] % 2 == 0 else 1
        for half in range(halves):
            part = (shape[0] // halves, *shape[1:]) if shape else ()
            start = (half * part[0], *(0,) * (len(shape) - 1)) if shape else ()
            numel = math.prod(part)
            ends = sorted({0, numel, *draw.sample(range(numel), min(numel, draw.randrange(n_ranks)))})
            those = draw.sample(range(n_ranks), len(ends) - 1)
            for rank, first, end in zip(those, ends, ends[1:], strict=False):
                ranks[rank].append(Owned(KINDS, name, Box(start, part), first, end - first))
    return ranks


@pytest.mark.parametrize("seed", range(20))
def test_cuts_say_what_the_ranks_own(seed):
    draw = random.Random(seed)
    ranks = dealt(draw, 5)
    files = [f"shard-{rank}" for rank in range(5)]
    cuts = merge([pack(owned, SHAPES) for owned in ranks], SHAPES)
    assert [fault_of(cut, 5) for cut in cuts] == [None] * len(cuts)
    assert {(cut.name, cut.start) for cut in cuts} == {(each.name, each.held.start) for own in ranks for each in own}
    expected = {
        piece for owned, file in zip(ranks, files, strict=True) for each in owned for piece in each.pieces(file)
    }
    found = [piece for cut in cuts for piece in every_piece_of(cut, files)]
    assert set(found) == expected and len(found) == len(expected)
    index = ShardIndex(cuts)
    by_shard = [piece for shard, file in enumerate(files) for each in index.owned(shard) for piece in each.pieces(file)]
    assert set(by_shard) == expected and len(by_shard) == len(expected)
    box = Box((draw.randrange(6), draw.randrange(4), 0), (1, 1, draw.randint(1, 5)))
    within = {piece for cut in cuts if cut.name == "a" for piece in pieces_within(cut, "weight", files, box)}
    assert within == {
        piece for piece in expected if (piece.kind, piece.name) == ("weight", "a") and piece.box.intersect(box)
    }


def test_the_pieces_of_a_cut_hold_its_elements_in_their_order():
    owned = Owned(("weight",), "a", Box((2, 0, 0), (4, 4, 5)), 3, 50)
    values = torch.arange(6 * 4 * 5).view(6, 4, 5)
    parts = [values[piece.box.slices].reshape(-1) for piece in owned.pieces("")]
    assert torch.equal(torch.cat(parts), values[2:].reshape(-1)[3:53])
    assert owned.pieces("")[0].key == "weight/a/2.0.3"


@pytest.mark.parametrize("degree", [1, 2, 3, 64, 2048])
def test_even_shares_are_two_runs_at_most(degree):
    size = -(-100_000 // degree)
    ranges = [(min(size, 100_000 - start), 7 + 5 * number) for number, start in enumerate(range(0, 100_000, size))]
    runs = runs_of(ranges)
    assert len(runs) <= 2
    assert [(numel, shard + n * stride) for count, numel, shard, stride in runs for n in range(count)] == ranges


FAULTS = {
    "the same range twice": (lambda own: own[0].append(own[1][0]), "overlap"),
    "a range forgotten": (lambda own: own[1].clear(), "missing"),
    "a range that begins too early": (
        lambda own: own.__setitem__(1, [Owned(KINDS, "b", Box((0,), (7,)), 2, 4)]),
        "overlap",
    ),
    "a range that ends too early": (
        lambda own: own.__setitem__(1, [Owned(KINDS, "b", Box((0,), (7,)), 3, 3)]),
        "missing",
    ),
    "a range without an end": (lambda own: own.__setitem__(1, [Owned(KINDS, "b", Box((0,), (7,)), 3, 9)]), "outside"),
    "another box": (lambda own: own.__setitem__(1, [Owned(KINDS, "b", Box((1,), (6,)), 2, 4)]), None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_of_ranks_are_handed_on_to_the_certificate(fault):
    """Only what is whole is said in runs; anything else box by box, as it was written."""
    change, rule = FAULTS[fault]
    ranks = [[Owned(KINDS, "b", Box((0,), (7,)), 0, 3)], [Owned(KINDS, "b", Box((0,), (7,)), 3, 4)]]
    change(ranks)
    cuts = merge([pack(owned, SHAPES) for owned in ranks], SHAPES)
    assert all(cut.runs == [(1, math.prod(cut.shape), cut.runs[0][2], 1)] for cut in cuts)
    problem = coverage_error(SHAPES["b"], [cut.box for cut in cuts])
    assert (problem is None) if rule is None else rule in (problem or "")


def test_a_rank_that_writes_a_moment_less_is_a_cut_of_its_own():
    ranks = [
        [Owned(KINDS, "b", Box((0,), (7,)), 0, 3)],
        [Owned(("weight",), "b", Box((0,), (7,)), 3, 4)],
    ]
    cuts = merge([pack(owned, SHAPES) for owned in ranks], SHAPES)
    assert {(cut.kinds, cut.box) for cut in cuts} == {(("weight",), Box((3,), (4,))), (KINDS, Box((0,), (3,)))}


def test_neighbouring_ranges_of_one_shard_are_runs_of_their_own():
    """One of a stride of 0 would be refused."""
    ranks = [[Owned(KINDS, "b", Box((0,), (7,)), 0, 2), Owned(KINDS, "b", Box((0,), (7,)), 2, 2)]]
    ranks.append([Owned(KINDS, "b", Box((0,), (7,)), 4, 3)])
    (cut,) = merge([pack(owned, SHAPES) for owned in ranks], SHAPES)
    assert cut.runs == [(1, 2, 0, 1), (1, 2, 0, 1), (1, 3, 1, 1)] and fault_of(cut, 2) is None
    assert elements_by_shard([cut], 2) == [4 * len(KINDS), 3 * len(KINDS)]


def test_nothing_owned_is_no_cut():
    assert merge([], SHAPES) == merge([pack([], SHAPES)], SHAPES) == []


def test_a_scalar_is_one_piece():
    (cut,) = merge([pack([Owned(KINDS, "c", Box((), ()), 0, 1)], SHAPES)], SHAPES)
    piece = Piece("weight", "c", (), (), "s", "weight/c/")
    assert list(pieces_within(cut, "weight", ["s"], Box((), ()))) == [piece]
