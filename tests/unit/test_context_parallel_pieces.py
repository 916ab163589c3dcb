"""Which pieces of documents ring attention's calls are made of: all pairs that see each other, each of them once."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from modeling.context import PADDING, Context
from modeling.kernels.varlen import Pieces, flash_lengths, plain_forward
from parallel.context_parallel import pieces as pieces_module
from parallel.context_parallel.context import split_context
from parallel.context_parallel.part import held_positions
from parallel.context_parallel.pieces import PieceCall, PiecePlan
from parallel.context_parallel.plan import plan_ring
from parallel.mesh import Axis


def axis_of(rank: int, cp: int) -> Axis:
    return Axis(rank, cp, tuple(range(cp)), None)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Context, int, int | None]:
    """Packed documents of any lengths in some rows, which may end in padding; a cp degree; a window or none."""
    cp = draw(st.integers(2, 4))
    seq_len = 2 * cp * draw(st.integers(1, 7))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted(draw(st.sets(st.integers(1, seq_len - 1), max_size=5)))
        lengths = [end - start for start, end in pairwise([0, *cuts, seq_len])]
        rows.append((lengths, draw(st.booleans())))
    return context_of(rows), cp, draw(st.none() | st.integers(1, seq_len + 1))


def context_of(rows: list[tuple[list[int], bool]]) -> Context:
    """Of documents' lengths by row, and whether the last one is padding."""
    documents, positions = [], []
    for lengths, is_padded in rows:
        numbers = [*range(len(lengths) - 1), PADDING if is_padded else len(lengths) - 1]
        documents.append([n for n, length in zip(numbers, lengths, strict=True) for _ in range(length)])
        positions.append(
            [0 if n == PADDING else at for n, size in zip(numbers, lengths, strict=True) for at in range(size)]
        )
    return Context(torch.tensor(positions), torch.tensor(documents), has_padding=any(padded for _, padded in rows))


def times_seen(calls: list[PieceCall], n_tokens: int, rule: str = "documented") -> Tensor:
    """How often a rank's calls for one block pair each held query (of all rows) with each held key: int (T, T)."""
    counts_TT = torch.zeros(n_tokens, n_tokens, dtype=torch.int64)
    for call in calls:
        queries, keys = (
            torch.cat([torch.arange(n_tokens)[each] for each in side]) for side in (call.queries, call.keys)
        )
        sides = (pairwise(bounds.tolist()) for bounds in (call.pieces.query_bounds, call.pieces.key_bounds))
        for (first, last), (oldest, newest) in zip(*sides, strict=True):
            sees_QK = RULES[rule](call.pieces, last - first, newest - oldest)
            counts_TT[queries[first:last, None], keys[None, oldest:newest]] += sees_QK
    return counts_TT


def documented(pieces: Pieces, n_queries: int, n_keys: int) -> Tensor:
    """As FlashAttention's own documentation has it: limits count from the diagonal that ends at the last key."""
    return within(pieces.left, pieces.right, n_queries, n_keys)


def within(left: int, right: int, n_queries: int, n_keys: int) -> Tensor:
    """Bool (Q, K): keys at most so many places left and right of the diagonal; below zero, any number."""
    places_QK = torch.arange(n_keys) - (torch.arange(n_queries)[:, None] + n_keys - n_queries)
    return (places_QK >= (-left if left >= 0 else -n_keys)) & (places_QK <= (right if right >= 0 else n_queries))


def flash_2(pieces: Pieces, n_queries: int, n_keys: int) -> Tensor:
    """As FlashAttention 2 has it in torch (flash_api.cpp, mask.h): what it makes of limits and of the longest keys."""
    _, longest_keys = flash_lengths(pieces)
    left, right = (-1 if limit >= longest_keys else limit for limit in (pieces.left, pieces.right))
    if left < 0 and right == 0:  # causal
        return within(-1, 0, n_queries, n_keys)
    if left >= 0 or right >= 0:  # local
        left, right = (longest_keys if limit < 0 else limit for limit in (left, right))
    return within(left, right, n_queries, n_keys)


def flash_3(pieces: Pieces, n_queries: int, n_keys: int) -> Tensor:
    """As FlashAttention 3 has it: a limit that is not there is the longest length on its side."""
    (longest_queries, longest_keys), (left, right) = flash_lengths(pieces), (pieces.left, pieces.right)
    if left >= 0 or right >= 0:
        left, right = (longest_keys - 1 if left < 0 else left), (longest_queries - 1 if right < 0 else right)
    return within(left, right, n_queries, n_keys)


RULES = {"documented": documented, "FlashAttention 2": flash_2, "FlashAttention 3": flash_3}


def planned(whole: Context, cp: int, window: int | None, rank: int, key_rank: int) -> Tensor:
    """By the tiles' own masks: which of all rows' held keys each held query sees, bool (T, T)."""
    rows, held = len(whole.documents_BS), whole.documents_BS.shape[1] // cp
    seen_BSS = torch.zeros(rows, held, held, dtype=torch.bool)
    for tile in plan_ring(whole, window, axis_of(rank, cp), tile=3)[key_rank]:
        mask_BQS = tile.mask_BQS()
        seen_BSS[:, tile.queries, tile.keys] = True if mask_BQS is None else mask_BQS
    return torch.block_diag(*seen_BSS.unbind()).bool()


def problems(whole: Context, cp: int, window: int | None) -> list[str]:
    """Where some rank's calls pair other queries and keys than its tiles, or pair them twice, by any of the rules.

    What padding sees of padding is not compared.
    """
    found = []
    for rank in range(cp):
        calls = split_context(whole, axis_of(rank, cp)).pieces(window, axis_of(rank, cp))
        for key_rank in range(cp):
            queries, keys = (
                (whole.documents_BS[:, held_positions(whole.documents_BS.shape[1], each, cp)] != PADDING).flatten()
                for each in (rank, key_rank)
            )
            wanted_TT = planned(whole, cp, window, rank, key_rank).long()
            for rule in RULES:
                counts_TT = times_seen(calls[key_rank], len(queries), rule)
                if not torch.equal(counts_TT[queries][:, keys], wanted_TT[queries][:, keys]):
                    found.append(f"{rule}, rank {rank}, keys of {key_rank}: other pairs")
                if counts_TT[queries][:, ~keys].any() or counts_TT[~queries][:, keys].any() or (counts_TT > 1).any():
                    found.append(f"{rule}, rank {rank}, keys of {key_rank}: padding and tokens, or twice")
    return found


@given(layouts())
@example((context_of([([8], False)]), 2, 7))  # a window that hides the first token from the last one alone
def test_the_calls_pair_what_the_tiles_masks_pair(layout: tuple[Context, int, int | None]) -> None:
    """By what the kernels document, and by what two of them make of the arguments that they are given."""
    assert problems(*layout) == []


@given(layouts())
def test_no_piece_has_a_query_or_a_key_without_the_other(layout: tuple[Context, int, int | None]) -> None:
    """So nothing depends on what a kernel says of a query without keys. No call has a query twice."""
    whole, cp, window = layout
    for rank in range(cp):
        calls = split_context(whole, axis_of(rank, cp)).pieces(window, axis_of(rank, cp))
        n_tokens = whole.documents_BS.numel() // cp
        first = calls[rank][0]
        assert first.queries == [slice(0, n_tokens)] and first.pieces.right == 0
        for call in (each for calls_of_block in calls for each in calls_of_block):
            counts_TT = times_seen([call], n_tokens)
            queries = torch.cat([torch.arange(n_tokens)[each] for each in call.queries])
            keys = torch.cat([torch.arange(n_tokens)[each] for each in call.keys])
            assert len(queries.unique()) == len(queries) == call.pieces.query_bounds[-1]
            assert len(keys) == call.pieces.key_bounds[-1]
            assert counts_TT[queries].any(1).all() and counts_TT[:, keys].any(0).all()
            for bounds, longest in (
                (call.pieces.query_bounds, call.pieces.longest_queries),
                (call.pieces.key_bounds, call.pieces.longest_keys),
            ):
                assert bounds.dtype == torch.int32 and int(bounds[0]) == 0
                assert int(bounds.diff().min()) > 0 and int(bounds.diff().max()) == longest


@given(layouts())
def test_one_call_a_block_where_there_is_no_window(layout: tuple[Context, int, int | None]) -> None:
    """Or where it hides nothing; the own tokens are then causal documents, and nothing of another rank's is masked."""
    whole, cp, _ = layout
    for window in (None, whole.documents_BS.shape[1]):
        for rank in range(cp):
            plan: PiecePlan = split_context(whole, axis_of(rank, cp)).pieces(window, axis_of(rank, cp))
            assert all(len(calls) <= 1 for calls in plan)
            limits = [{(call.pieces.left, call.pieces.right) for call in calls} for calls in plan]
            assert limits[rank] == {(-1, 0)}
            assert all(each <= {(-1, -1)} for key_rank, each in enumerate(limits) if key_rank != rank)


def test_a_long_document_is_the_same_work_on_all_ranks() -> None:
    """Pairs of a sequence of one document. With a window below a chunk, at most two more calls a rank."""
    whole = context_of([([64], False)])
    for window, most_calls in ((None, 4), (5, 3)):
        work, calls = [], []
        for rank in range(4):
            plan = split_context(whole, axis_of(rank, 4)).pieces(window, axis_of(rank, 4))
            work.append(sum(int(times_seen(each, 16).sum()) for each in plan))
            calls.append(sum(map(len, plan)))
        assert sum(work) == int(whole.mask_BSS(window).sum())
        assert max(calls) <= most_calls
        assert window is not None or len(set(work)) == 1


def test_grouped_heads_of_single_queries_are_not_laid_otherwise() -> None:
    """The longest queries that the operators are told of are never one, nor fewer than the keys where that counts."""
    bounds = torch.tensor([0, 1], dtype=torch.int32)
    assert flash_lengths(Pieces(bounds, bounds, 1, 1)) == (2, 1)
    assert flash_lengths(Pieces(bounds, bounds, 9, 4, left=3)) == (9, 9)
    assert flash_lengths(Pieces(bounds, bounds, 9, 4, left=3, right=0)) == (9, 4)


def test_the_formula_knows_the_documented_limits() -> None:
    """The CPU's stand-in for the kernel sees what the rule above says, for limits of every kind."""
    torch.manual_seed(0)
    bounds = (torch.tensor([0, 5, 6, 15], dtype=torch.int32), torch.tensor([0, 3, 10, 14], dtype=torch.int32))
    q_THC, k_UGC, v_UGC = torch.randn(15, 4, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8)
    for left, right in ((-1, -1), (-1, 0), (2, 0), (6, -1)):
        pieces = Pieces(*bounds, 9, 7, left, right)
        out_THC, lse_HT = plain_forward(q_THC, k_UGC, v_UGC, pieces)
        scores_HTU = torch.einsum("thc,uhc->htu", q_THC, k_UGC.repeat_interleave(2, 1)) * 8**-0.5
        sides = (pairwise(each.tolist()) for each in bounds)
        sees_TU = torch.block_diag(
            *(
                documented(pieces, last - first, newest - oldest)
                for (first, last), (oldest, newest) in zip(*sides, strict=True)
            )
        ).bool()
        exact_HT = scores_HTU.masked_fill(~sees_TU, float("-inf")).logsumexp(-1)
        weights_HTU = torch.exp(
            scores_HTU.masked_fill(~sees_TU, float("-inf")) - exact_HT.nan_to_num(neginf=0)[..., None]
        )
        torch.testing.assert_close(lse_HT, exact_HT)
        torch.testing.assert_close(out_THC, torch.einsum("htu,uhc->thc", weights_HTU, v_UGC.repeat_interleave(2, 1)))


CROSSING = context_of([([3, 30, 15], False), ([48], False)])
WINDOWS = (None, 12)
PLANTED = {
    "a full piece is causal": ("whole_pieces", lambda made: lambda *a: [each._replace(right=0) for each in made(*a)]),
    "a causal piece is full": ("own_pieces", lambda made: lambda *a: [each._replace(right=-1) for each in made(*a)]),
    "a window is one token wider": (
        "windowed_pieces",
        lambda made: lambda *a: [each._replace(left=each.left + (each.left >= 0)) for each in made(*a)],
    ),
    "windows count from the first key": (
        "windowed_pieces",
        lambda made: (
            lambda mine, theirs, window: [
                each._replace(left=window - 1 if each.left >= 0 else -1) for each in made(mine, theirs, window)
            ]
        ),
    ),
    "documents begin one token later": (
        "documents_of",
        lambda made: (
            lambda bounds, seq_len, *a: made(sorted({each + (each % seq_len > 0) for each in bounds}), seq_len, *a)
        ),
    ),
}


def test_documents_that_cross_chunks() -> None:
    """Sound where the planted faults below are."""
    assert not any(problems(CROSSING, 3, window) for window in WINDOWS)


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_pairs_others(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Each of them is seen where documents cross chunks, whole or within a window."""
    name, replaced = PLANTED[fault]
    monkeypatch.setattr(pieces_module, name, replaced(getattr(pieces_module, name)))
    assert any(problems(CROSSING, 3, window) for window in WINDOWS)


def test_planted_lengths_as_they_are_hide_keys() -> None:
    """Without the longer length that it is told of, FlashAttention 2 would hide a short document's keys in a window."""
    bounds = torch.tensor([0, 9], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    pieces = Pieces(*bounds, 9, 2, left=1)
    assert torch.equal(flash_2(pieces, 9, 2), documented(pieces, 9, 2))
    as_told = Pieces(*bounds, 9, 2, left=1, right=2)  # what the kernel makes of no limit and two keys at most
    assert not torch.equal(documented(as_told, 9, 2), documented(pieces, 9, 2))


@settings(max_examples=20)
@given(st.integers(2, 8), st.integers(1, 500), st.integers(0, 99))
def test_documents_of_a_rank(cp: int, n_documents: int, seed: int) -> None:
    """Those of which it holds a token, each once, in order."""
    chunk, rows = 64, 2
    seq_len = 2 * cp * chunk
    starts = torch.randint(rows * seq_len, (n_documents,), generator=torch.Generator().manual_seed(seed)).tolist()
    bounds = sorted({0, seq_len, rows * seq_len, *starts})
    for rank in range(cp):
        held = {row * seq_len + at for row in range(rows) for at in held_positions(seq_len, rank, cp).tolist()}
        wanted = [
            (start // seq_len, start % seq_len, start % seq_len + stop - start)
            for start, stop in pairwise(bounds)
            if any(at in held for at in range(start, stop))
        ]
        assert pieces_module.documents_of(bounds, seq_len, rank, cp) == wanted
