"""Ring attention's plan by pieces of documents, for kernels that take sequences of various lengths (FlashAttention).

The plan follows from where documents begin, the ring's chunks and the window; nothing here reads from a device. Every
run of equal document numbers in a row is one document (padding too), and its positions are consecutive.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from modeling.kernels.varlen import NO_LIMIT, Pieces
from modeling.transfer import to_device
from parallel.context_parallel.part import chunk_length


class Part(NamedTuple):
    """A document's tokens in one chunk: consecutive in their row, and among the tokens that the chunk's rank holds."""

    start: int  # in the row
    stop: int
    held: int  # the place of the first one among the row's tokens that the rank holds

    def cut(self, start: int, stop: int) -> "Part":
        """The tokens of this part that lie between ``start`` and ``stop`` in the row; it may be empty."""
        return Part(max(self.start, start), min(self.stop, stop), self.held + max(start - self.start, 0))


class Piece(NamedTuple):
    """Consecutive held queries and keys of one document, with the kernel's window limits (``Pieces``).

    ``left`` and ``right``: how many keys a query sees to the left and to the right of the diagonal.
    """

    queries: slice
    keys: slice
    left: int
    right: int


@dataclass(frozen=True)
class PieceCall:
    """The work of one kernel call. Slices are places among the held tokens of all rows, one row after another."""

    queries: list[slice]  # neighbouring slices joined
    keys: list[slice]
    pieces: Pieces


PiecePlan = list[list[PieceCall]]  # by the cp rank whose keys they are


def plan_pieces(
    bounds: Sequence[int], seq_len: int, window: int | None, rank: int, cp: int, device: torch.device
) -> PiecePlan:
    """The kernel calls of cp rank ``rank``, by the rank that holds the keys. No communication.

    ``bounds``: where documents begin in the flattened batch, ascending from 0, and at the end its number of tokens
    (``Context.bounds``). The plan's tensors are copied to ``device`` at once, and the host does not wait for them.
    """
    documents = documents_of(bounds, seq_len, rank, cp)
    longest = max(stop - start for _, start, stop in documents)
    window = None if window is None or window >= longest else window
    crossing = [each for each in documents if _begins_before_a_chunk(each, seq_len, rank, cp)]
    groups = [
        calls_of(pieces_of(documents if key_rank == rank else crossing, seq_len, window, rank, key_rank, cp))
        for key_rank in range(cp)
    ]
    numbers = [side for calls in groups for call in calls for side in (_ends(call, "queries"), _ends(call, "keys"))]
    sizes = [len(side) for side in numbers]
    flat = to_device(torch.tensor([end for side in numbers for end in side], dtype=torch.int32), device)
    tensors = iter(flat.split(sizes))
    return [
        [
            PieceCall(
                _joined([piece.queries for piece in call]),
                _joined([piece.keys for piece in call]),
                Pieces(
                    next(tensors),
                    next(tensors),
                    max(_length(piece.queries) for piece in call),
                    max(_length(piece.keys) for piece in call),
                    call[0].left,
                    call[0].right,
                ),
            )
            for call in calls
        ]
        for calls in groups
    ]


def documents_of(bounds: Sequence[int], seq_len: int, rank: int, cp: int) -> list[tuple[int, int, int]]:
    """(row, start, stop) of each document of which the rank holds a token; start and stop within the row."""
    chunk = chunk_length(seq_len, cp)
    found: dict[int, None] = {}  # numbers of documents, ascending, each once
    for row_start in range(0, bounds[-1], seq_len):
        for number in (rank, 2 * cp - 1 - rank):
            first = row_start + number * chunk
            found.update(dict.fromkeys(range(bisect_right(bounds, first) - 1, bisect_left(bounds, first + chunk))))
    return [
        (bounds[each] // seq_len, bounds[each] % seq_len, bounds[each] % seq_len + bounds[each + 1] - bounds[each])
        for each in found
    ]


def _begins_before_a_chunk(document: tuple[int, int, int], seq_len: int, rank: int, cp: int) -> bool:
    """Whether the document begins before one of the rank's chunks and reaches into it.

    For no other document do the rank's queries see keys of another rank.
    """
    chunk, (_, start, stop) = chunk_length(seq_len, cp), document
    return any(start < number * chunk < stop for number in (rank, 2 * cp - 1 - rank))


def pieces_of(
    documents: Sequence[tuple[int, int, int]], seq_len: int, window: int | None, rank: int, key_rank: int, cp: int
) -> list[Piece]:
    """The pieces of ``rank``'s queries and ``key_rank``'s keys of all documents, as places among held tokens."""
    chunk = chunk_length(seq_len, cp)
    found = []
    for row, start, stop in documents:
        mine, theirs = (_parts(start, stop, each, cp, chunk) for each in (rank, key_rank))
        if key_rank == rank:
            pieces = own_pieces(mine, window)
        elif window is None or stop - start <= window:
            pieces = whole_pieces(mine, theirs)
        else:
            pieces = windowed_pieces(mine, theirs, window)
        found += [
            piece._replace(queries=_in_row(piece.queries, row, chunk), keys=_in_row(piece.keys, row, chunk))
            for piece in pieces
        ]
    return found


def own_pieces(mine: Sequence[Part], window: int | None) -> Iterator[Piece]:
    """The pieces of one document among a rank's own queries and keys.

    A document that reaches into both chunks has the end of the first one and the beginning of the second: they are
    neighbours where they are held, and in their order. So without a window all its tokens are one piece, each token
    seeing those before it. With a window distances count: each chunk is a piece of its own, and the second one's
    queries have another with the first one's keys, unless the chunks are neighbours in the row too.
    """
    parts = [*mine]
    if len(parts) == 2 and (window is None or parts[0].stop == parts[1].start):
        parts = [Part(parts[0].start, parts[0].start + sum(map(_length_of, parts)), parts[0].held)]
    for part in parts:
        yield Piece(_held(part), _held(part), NO_LIMIT if window is None else window - 1, 0)
    if len(parts) == 2 and window is not None:
        yield from windowed_pieces(parts[1:], parts[:1], window)


def whole_pieces(mine: Sequence[Part], theirs: Sequence[Part]) -> Iterator[Piece]:
    """The piece of one document with another rank's keys where the window does not matter; none if no query sees a key.

    All queries of the piece see all its keys.

    A rank's first chunk lies before both chunks of each rank with a higher number, and its second one after both. So
    both of its chunks see the other rank's first chunk and nothing else, or its second one sees both of the other's;
    and a document in the first and the last of three chunks holds all of the one between them, so that its tokens are
    neighbours where they are held.
    """
    queries = [part for part in mine if any(other.start < part.start for other in theirs)]
    keys = [part for part in theirs if any(part.start < other.start for other in mine)]
    if queries and keys:
        yield Piece(_all_held(queries), _all_held(keys), NO_LIMIT, NO_LIMIT)


def windowed_pieces(mine: Sequence[Part], theirs: Sequence[Part], window: int) -> Iterator[Piece]:
    """The pieces of one document with earlier chunks' keys under a window, without queries and keys that see nothing.

    The kernel counts its limit on the left from the diagonal that ends at the last query p and the last key k, whereas
    a window counts from equal positions. The diagonal's keys lie p - k before its queries, so a window of window - 1
    earlier keys is a limit of window - 1 - (p - k). That is at least 0, since the last query that is left sees the last
    key.
    """
    for part in mine:
        for other in theirs:
            if other.start > part.start:
                continue
            queries = part.cut(part.start, other.stop + window - 1)
            keys = other.cut(part.start - window + 1, other.stop)
            if queries.stop <= queries.start:
                continue
            sees_all = queries.stop - 1 - keys.start < window
            left = NO_LIMIT if sees_all else window - 1 - (queries.stop - keys.stop)
            yield Piece(_held(queries), _held(keys), left, NO_LIMIT)


def calls_of(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """The pieces grouped into few calls: those of one call have the same limits, and no query twice.

    No query may come twice since a call's results are merged at once. Pieces on the diagonal come first, since each
    query has to meet itself first (``parallel.context_parallel.ring.merge``).
    """
    calls: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda each: (each.right != 0, each.queries.start)):
        limits = piece[2:]
        call = next((c for c in calls if c[0][2:] == limits and c[-1].queries.stop <= piece.queries.start), None)
        if call is None:
            calls.append([piece])
        else:
            call.append(piece)
    return calls


def _parts(start: int, stop: int, rank: int, cp: int, chunk: int) -> list[Part]:
    """The parts of a document, ``start`` to ``stop`` in its row, that the rank holds: at most one in each chunk."""
    whole = [
        Part(rank * chunk, (rank + 1) * chunk, 0),
        Part((2 * cp - 1 - rank) * chunk, (2 * cp - rank) * chunk, chunk),
    ]
    return [part for each in whole if (part := each.cut(start, stop)).start < part.stop]


def _length_of(part: Part) -> int:
    return part.stop - part.start


def _held(part: Part) -> slice:
    return slice(part.held, part.held + _length_of(part))


def _all_held(parts: Sequence[Part]) -> slice:
    assert all(_held(one).stop == other.held for one, other in pairwise(parts))
    return slice(parts[0].held, _held(parts[-1]).stop)


def _in_row(held: slice, row: int, chunk: int) -> slice:
    """The place among the held tokens of all rows, from that in one row; the rank holds two chunks of each row."""
    return slice(row * 2 * chunk + held.start, row * 2 * chunk + held.stop)


def _length(places: slice) -> int:
    return places.stop - places.start


def _ends(call: Sequence[Piece], side: str) -> list[int]:
    return [0, *accumulate(_length(getattr(piece, side)) for piece in call)]


def _joined(places: Sequence[slice]) -> list[slice]:
    """The same places in the same order, with neighbouring slices joined."""
    found = [places[0]]
    for each in places[1:]:
        if each.start == found[-1].stop:
            found[-1] = slice(found[-1].start, each.stop)
        else:
            found.append(each)
    return found
