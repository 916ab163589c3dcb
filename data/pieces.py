"""The pieces of documents that make up packed samples: finding, copying and hashing them.

Shape letters: B samples, W = S + 1 tokens of a window, P pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from data.packing import Packing
from data.tokenfile import TokenFile


@dataclass(frozen=True)
class Pieces:
    """The ranges of tokens that make up samples, sample after sample, in each sample's order."""

    row_P: np.ndarray  # the sample's place among those that were asked for
    file_P: np.ndarray
    start_P: np.ndarray  # the first token, counted from the file's start
    length_P: np.ndarray
    offset_P: np.ndarray  # where the piece begins in the sample

    def fragments(self) -> tuple[np.ndarray, np.ndarray]:
        """(row_P, offset_P) of each piece, which is a part of one document, in the form of ``Boundaries.find``."""
        return self.row_P, self.offset_P

    def tokens_B(self, n_rows: int) -> np.ndarray:
        """The number of tokens of each sample, int64."""
        return np.bincount(self.row_P, self.length_P, minlength=n_rows).astype(np.int64)

    def copy_into(self, window_BW: np.ndarray, files: Sequence[TokenFile]) -> None:
        """Copies the samples' tokens into ``window_BW``, which has to be filled with zeros."""
        columns = (self.row_P, self.file_P, self.start_P, self.length_P, self.offset_P)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        for _, number, start, length, _ in rows:
            files[number].prefetch(start, start + length)
        for row, number, start, length, offset in rows:
            window_BW[row, offset : offset + length] = files[number].tokens[start : start + length]

    def marks(self, n_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """(start_B, mark_B), int64: each sample's first token, and a hash of all its pieces."""
        start_B, mark_B = np.empty(n_rows, np.int64), np.empty(n_rows, np.int64)
        bounds = np.searchsorted(self.row_P, np.arange(n_rows + 1))
        for row, (begin, end) in enumerate(pairwise(bounds.tolist())):
            ranges = np.stack([self.start_P[begin:end], self.length_P[begin:end]])
            start_B[row], mark_B[row] = self.start_P[begin], xxhash.xxh3_64_intdigest(ranges.tobytes()) >> 1
        return start_B, mark_B


def pieces_of(packings: Sequence[Packing], file_B: np.ndarray, sample_B: np.ndarray) -> Pieces:
    """The pieces of these samples, each numbered within its file."""
    first_B, count_B = np.empty(len(file_B), np.int64), np.empty(len(file_B), np.int64)
    for number in np.unique(file_B).tolist():
        is_here_B, first_piece = file_B == number, packings[number].first_piece
        first_B[is_here_B] = first_piece[sample_B[is_here_B]]
        count_B[is_here_B] = first_piece[sample_B[is_here_B] + 1] - first_B[is_here_B]
    row_P = np.repeat(np.arange(len(file_B)), count_B)
    begin_B = np.cumsum(count_B) - count_B  # where each sample's pieces begin among all of them
    piece_P = np.arange(len(row_P)) + (first_B - begin_B)[row_P]
    file_P = file_B[row_P]
    start_P, length_P = np.empty(len(row_P), np.int64), np.empty(len(row_P), np.int64)
    for number in np.unique(file_P).tolist():
        is_here_P, packing = file_P == number, packings[number]
        start_P[is_here_P] = packing.start_P[piece_P[is_here_P]]
        length_P[is_here_P] = packing.length_P[piece_P[is_here_P]]
    before_P = np.cumsum(length_P) - length_P
    return Pieces(row_P, file_P, start_P, length_P, before_P - before_P[begin_B][row_P])


def samples_with(packing: Packing, seq_len: int, first: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(number in the file, first, stop), as arrays, of each sample with tokens of [first, stop) as inputs.

    It searches the whole packing; the results bound the tokens of the range that are the sample's inputs.
    """
    stop_P = packing.start_P + np.minimum(packing.length_P, seq_len)
    piece_W = np.flatnonzero((packing.start_P < stop) & (stop_P > first))
    sample_W = np.searchsorted(packing.first_piece, piece_W, side="right") - 1
    return sample_W, np.maximum(packing.start_P[piece_W], first), np.minimum(stop_P[piece_W], stop)


def shares_of(packings: Sequence[Packing], seq_len: int, n_tokens: int) -> dict[str, float]:
    """The shares of padding positions, cut documents and left-out tokens. It reads the lengths of all pieces.

    ``n_tokens`` is the number of tokens in all files.
    """
    inputs = sum(packing.n_inputs(seq_len) for packing in packings)
    n_documents, n_samples = (sum(getattr(p, name) for p in packings) for name in ("n_documents", "n_samples"))
    return {
        "padding": 1 - inputs / max(1, n_samples * seq_len),
        "cut": sum(packing.n_cut for packing in packings) / max(1, n_documents),
        "left_out": sum(packing.n_left_out for packing in packings) / max(1, n_tokens),
    }
