"""Which positions a cp rank holds, and what ring attention plans to compute of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modeling.context import PADDING, Context
from modeling.dropout import Draws
from parallel.context_parallel import plan
from parallel.context_parallel.context import split_context
from parallel.context_parallel.core import make_core
from parallel.context_parallel.part import held_position, held_positions, natural_order, rank_major_order, take_share
from parallel.mesh import Axis

SIZES = {"cp": st.integers(1, 9), "chunk": st.integers(1, 7)}


def axis_of(rank: int, cp: int) -> Axis:
    return Axis(rank, cp, tuple(range(cp)), None)


def one_document(seq_len: int) -> Context:
    return Context(torch.arange(seq_len)[None], torch.zeros(1, seq_len, dtype=torch.long))


def test_zig_zag() -> None:
    assert held_positions(12, 0, 3).tolist() == [0, 1, 10, 11]
    assert held_positions(12, 1, 3).tolist() == [2, 3, 8, 9]
    assert held_positions(12, 2, 3).tolist() == [4, 5, 6, 7]


@given(**SIZES)
def test_each_position_is_held_once(cp: int, chunk: int) -> None:
    seq_len = 2 * cp * chunk
    held = [held_positions(seq_len, rank, cp) for rank in range(cp)]
    assert sorted(torch.cat(held).tolist()) == list(range(seq_len))
    assert all(positions.dtype == torch.int64 and (positions.diff() > 0).all() for positions in held)
    for rank, positions in enumerate(held):
        assert [held_position(index, seq_len, rank, cp) for index in range(2 * chunk)] == positions.tolist()


@given(**SIZES)
def test_orders_are_inverse(cp: int, chunk: int) -> None:
    seq_len = 2 * cp * chunk
    there, back = rank_major_order(seq_len, cp), natural_order(seq_len, cp)
    assert torch.equal(there[back], torch.arange(seq_len)) and torch.equal(back[there], torch.arange(seq_len))


@given(**SIZES)
def test_dropout_is_drawn_by_the_held_places(cp: int, chunk: int) -> None:
    whole = one_document(2 * cp * chunk)
    whole.draws = Draws(0, 1, torch.tensor([5]), torch.arange(2 * cp * chunk))
    for rank in range(cp):
        draws = split_context(whole, axis_of(rank, cp)).draws
        assert draws is not None and (draws.seed, draws.step, draws.samples_B.tolist()) == (0, 1, [5])
        assert draws.places_S.tolist() == held_positions(2 * cp * chunk, rank, cp).tolist()


@given(**SIZES)
def test_causal_work_is_equal(cp: int, chunk: int) -> None:
    """Query-key pairs of one long document: the same number on every rank."""
    work = [int((held_positions(2 * cp * chunk, rank, cp) + 1).sum()) for rank in range(cp)]
    assert len(set(work)) == 1


@given(**SIZES)
def test_tiles_of_one_document_are_equally_many(cp: int, chunk: int) -> None:
    """2 * cp + 1 pairs of chunks a rank, of which all but two need no mask."""
    for rank in range(cp):
        tiles = [
            tile for block in plan.plan_ring(one_document(2 * cp * chunk), None, axis_of(rank, cp)) for tile in block
        ]
        assert len(tiles) == 2 * cp + 1
        assert sum(tile.sees_all for tile in tiles) == 2 * cp + 1 - (2 if chunk > 1 else 0)


def test_plan_skips_other_documents_and_what_the_window_hides() -> None:
    lengths = [8, 8]
    positions_BS = torch.cat([torch.arange(length) for length in lengths])[None]
    documents_BS = torch.tensor([0, 1]).repeat_interleave(torch.tensor(lengths))[None]
    whole = Context(positions_BS, documents_BS)
    assert [len(block) for block in plan.plan_ring(whole, None, axis_of(0, 2))] == [2, 1]
    assert [len(block) for block in plan.plan_ring(whole, 1, axis_of(0, 2))] == [2, 0]


@given(
    cp=st.integers(1, 4),
    chunk=st.integers(1, 7),
    tile=st.integers(1, 5),
    window=st.none() | st.integers(1, 9),
    data=st.data(),
)
def test_plan_covers_the_mask(cp: int, chunk: int, tile: int, window: int | None, data: st.DataObject) -> None:
    """The tiles' masks put together are the rows of the one mask that this rank's queries have."""
    seq_len = 2 * cp * chunk
    documents_BS = torch.tensor([sorted(data.draw(st.lists(st.integers(0, 3), min_size=seq_len, max_size=seq_len)))])
    starts = torch.searchsorted(documents_BS, documents_BS)
    documents_BS[documents_BS == 3] = PADDING
    whole = Context(torch.arange(seq_len) - starts, documents_BS)
    rank = data.draw(st.integers(0, cp - 1))
    blocks = plan.plan_ring(whole, window, axis_of(rank, cp), tile)
    mine = held_positions(seq_len, rank, cp)
    for key_rank, tiles in enumerate(blocks):
        covered = torch.zeros(len(mine), len(mine), dtype=torch.bool)
        for piece in tiles:
            assert piece.queries.stop - piece.queries.start <= tile and piece.keys.stop - piece.keys.start <= tile
            mask_BQS = piece.mask_BQS()
            covered[piece.queries, piece.keys] = True if mask_BQS is None else mask_BQS[0]
        theirs = held_positions(seq_len, key_rank, cp)
        assert torch.equal(covered, whole.mask_BSS(window)[0][mine][:, theirs])


def test_split_context() -> None:
    documents_BS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, PADDING]])
    positions_BS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0]])
    whole = Context(positions_BS, documents_BS, balance_scale=0.5, z_scale=0.25, has_padding=True)
    first, second = (split_context(whole, axis_of(rank, 2)) for rank in (0, 1))
    assert first.positions_BS.tolist() == [[0, 1, 2, 0]] and first.documents_BS.tolist() == [[0, 0, 1, PADDING]]
    assert second.positions_BS.tolist() == [[2, 3, 0, 1]] and second.documents_BS.tolist() == [[0, 0, 1, 1]]
    assert first.has_padding and second.has_padding
    assert first.whole is whole and (first.balance_scale, first.z_scale) == (0.5, 0.25)
    assert torch.equal(take_share(documents_BS, axis_of(1, 2)), second.documents_BS)


def test_core_needs_ranks() -> None:
    with pytest.raises(AssertionError):
        make_core("ring", axis_of(0, 1))
