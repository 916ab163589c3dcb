"""Packed documents cut into pieces: some queries of a document, and the keys that they can see.

Attention computed piece by piece costs in proportion to each document's length squared, or to its length times the
window, instead of to the whole row's length squared. Shape letters: B batch, S sequence, Q queries, K keys.
"""

from bisect import bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

# Queries of one piece. Attention of 8 rows of 512 tokens in documents of 1 to 200, 6 heads of 64 channels, forward and
# backward, CPU ms: 50 with 64, 54 with 128, 60 with 256; of whole rows 101, 107 and 131 (AMD EPYC without AMX, one
# thread, 2026-11-23). Smaller ones cost more calls.
QUERY_BLOCK = 128


class Piece(NamedTuple):
    """Consecutive queries of one document, and the keys from the first to the last that any of them sees.

    The last key is the last query itself. ``rows`` are neighbouring rows of the batch whose documents lie alike.
    """

    rows: slice
    queries: slice
    keys: slice

    def of_band(self, band: Tensor) -> Tensor:
        """This piece's part (..., Q, K) of a matrix over distances: see ``Band``."""
        n_queries, n_keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return band[..., band.shape[-2] - n_queries :, band.shape[-1] - n_keys :]


class Band(NamedTuple):
    """Positions (1, Q) and (1, K) of the last queries of a document that is as long as the longest piece's keys.

    What depends on distances alone, as masks within a document do, is made once for them. Each piece has the lower
    right corner of that matrix, since its last key is its last query.
    """

    query_positions_1Q: Tensor
    key_positions_1K: Tensor


def cut_documents(documents_BS: Tensor, window: int | None, block: int) -> list[Piece]:
    """The pieces of all documents, of at most ``block`` queries; each query is in one of them. Waits for the device.

    ``documents_BS`` are the numbers of the documents within their rows; every run of equal numbers is one document.
    """
    seq_len = documents_BS.shape[1]
    starts: list[list[int]] = [[0] for _ in documents_BS]
    for row, place in (documents_BS[:, 1:] != documents_BS[:, :-1]).nonzero().tolist():
        starts[row].append(place + 1)
    pieces, row = [], 0
    while row < len(starts):
        end = row + 1
        while end < len(starts) and starts[end] == starts[row]:
            end += 1
        for start, stop in zip(starts[row], [*starts[row][1:], seq_len], strict=True):
            for first in range(start, stop, block):
                oldest = start if window is None else max(start, first - window + 1)
                last = min(first + block, stop)
                pieces.append(Piece(slice(row, end), slice(first, last), slice(oldest, last)))
        row = end
    return pieces


def cut_rows(bounds: list[int], seq_len: int, window: int | None, block: int) -> list[Piece]:
    """Pieces of all rows at once, of at most ``block`` queries: the keys from the first that any row's query sees.

    ``bounds`` are those of the documents in the flattened batch, from 0 to its end. What a row's query does not see of
    the keys, a mask has to hide.
    """
    row_starts = range(0, bounds[-1], seq_len)
    pieces = []
    for first in range(0, seq_len, block):
        oldest = min(bounds[bisect_right(bounds, start + first) - 1] - start for start in row_starts)
        if window is not None:
            oldest = max(oldest, first - window + 1)
        last = min(first + block, seq_len)
        pieces.append(Piece(slice(0, len(row_starts)), slice(first, last), slice(oldest, last)))
    return pieces


def band_of(pieces: list[Piece], device: torch.device) -> Band:
    """The smallest band that has a corner for each of the pieces."""
    n_queries = max(piece.queries.stop - piece.queries.start for piece in pieces)
    n_keys = max(piece.keys.stop - piece.keys.start for piece in pieces)
    key_positions_1K = torch.arange(n_keys, device=device)[None]
    return Band(key_positions_1K[:, n_keys - n_queries :], key_positions_1K)


def query_pieces(n_rows: int, n_queries: int, n_keys: int, block: int) -> list[Piece]:
    """All queries of a batch, at most ``block`` in a piece, and all keys."""
    rows, keys = slice(0, n_rows), slice(0, n_keys)
    return [Piece(rows, slice(first, min(first + block, n_queries)), keys) for first in range(0, n_queries, block)]
