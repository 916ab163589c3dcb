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

    The last key belongs to the same token as the last query. ``rows`` are neighbouring rows of the batch whose
    documents have the same boundaries.
    """

    rows: slice
    queries: slice
    keys: slice

    def of_band(self, band: Tensor) -> Tensor:
        """This piece's part (..., Q, K) of a matrix that was made from a ``Band``."""
        n_queries, n_keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return band[..., band.shape[-2] - n_queries :, band.shape[-1] - n_keys :]


class Band(NamedTuple):
    """Positions (1, Q) of the last queries and (1, K) of the keys, in a document as long as the longest piece's keys.

    A matrix that depends on distances alone, such as a mask within a document, is made once from them. Each piece then
    takes the lower right corner of that matrix, because its last key and its last query are the same token.
    """

    query_positions_1Q: Tensor
    key_positions_1K: Tensor


def cut_documents(documents_BS: Tensor, window: int | None, block: int) -> list[Piece]:
    """The pieces of all documents, with at most ``block`` queries each; every query is in one. Waits for the device.

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
    """Pieces of all rows together, with at most ``block`` queries each, and the keys that any row's queries see.

    ``bounds`` are the boundaries of the documents in the flattened batch, from 0 to its end. A mask still has to hide
    the keys that a single row's queries do not see.
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
    """The smallest band from which each of the pieces can take its corner."""
    n_queries = max(piece.queries.stop - piece.queries.start for piece in pieces)
    n_keys = max(piece.keys.stop - piece.keys.start for piece in pieces)
    key_positions_1K = torch.arange(n_keys, device=device)[None]
    return Band(key_positions_1K[:, n_keys - n_queries :], key_positions_1K)


def query_pieces(n_rows: int, n_queries: int, n_keys: int, block: int) -> list[Piece]:
    """Pieces of at most ``block`` queries each that cover all queries of a batch, each with all keys."""
    rows, keys = slice(0, n_rows), slice(0, n_keys)
    return [Piece(rows, slice(first, min(first + block, n_queries)), keys) for first in range(0, n_queries, block)]
