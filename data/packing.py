"""Packing: combining documents, or parts of long ones, into samples instead of laying all documents end to end.

A document of more than seq_len + 1 tokens does not fit a sample: it is cut into windows of seq_len + 1 tokens at stride
seq_len, each a sample of its own, and its remainder is a piece like a shorter document. Pieces are then combined into
samples so that none is cut (``best_fit``), or each is a sample of its own (``one_document``). A piece of one token,
which predicts nothing, is left out.

Shape letters: D documents, P pieces.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from data.config import PackedBy


@dataclass(frozen=True)
class Packing:
    """The samples of one token file. Sample b is made of the pieces [first_piece[b], first_piece[b + 1])."""

    first_piece: np.ndarray  # int64, one more than there are samples
    start_P: np.ndarray  # int64: the first token of each piece, counted from the file's start
    length_P: np.ndarray  # int32: number of tokens of each piece; seq_len + 1 where the last one is only a target
    n_documents: int  # documents of two tokens or more
    n_cut: int  # documents that no sample holds whole
    n_left_out: int  # tokens in no piece

    @property
    def n_samples(self) -> int:
        """The number of samples in the file."""
        return len(self.first_piece) - 1

    def n_inputs(self, seq_len: int) -> int:
        """The number of the samples' positions that hold a token."""
        return int(np.minimum(self.length_P, seq_len).sum(dtype=np.int64))


def pack(starts_D: np.ndarray, n_tokens: int, seq_len: int, packed_by: PackedBy) -> Packing:
    """The packing of a file of ``n_tokens`` whose documents, none empty, begin at ``starts_D``, ascending.

    Samples are numbered by the place of their first piece in the file, and the pieces of a sample are in the file's
    order. The result depends on the arguments alone.
    """
    sizes_D = np.diff(np.append(starts_D, n_tokens))
    full_D = np.maximum(sizes_D - 1, 0) // seq_len
    rest_D = sizes_D - full_D * seq_len
    nth_W = np.arange(full_D.sum()) - np.repeat(np.cumsum(full_D) - full_D, full_D)
    window_starts = np.repeat(starts_D, full_D) + nth_W * seq_len
    has_rest_D = rest_D > 1
    start_R, length_R = (starts_D + full_D * seq_len)[has_rest_D], rest_D[has_rest_D]
    match packed_by:
        case "best_fit":
            sample_R = best_fit(length_R, seq_len)
        case "one_document":
            sample_R = np.arange(len(length_R))
        case _:
            assert_never(packed_by)
    n_packed = int(sample_R.max(initial=-1)) + 1
    start_P = np.concatenate([start_R, window_starts])
    length_P = np.concatenate([length_R, np.full(len(window_starts), seq_len + 1)])
    sample_P = np.concatenate([sample_R, n_packed + np.arange(len(window_starts))])
    first_piece, order = _in_file_order(start_P, sample_P)
    return Packing(
        first_piece,
        start_P[order].astype(np.int64),
        length_P[order].astype(np.int32),
        n_documents=int(np.count_nonzero(sizes_D > 1)),
        n_cut=int(np.count_nonzero(full_D + has_rest_D > 1)),
        n_left_out=int(np.count_nonzero((rest_D == 1) & (full_D == 0))),
    )


def best_fit(length_P: np.ndarray, room: int) -> np.ndarray:
    """The bin of each piece, int64. The longest piece comes first, and each goes into the fullest bin that it fits.

    This is best-fit decreasing (Johnson, 1973) with bins of ``room`` tokens, as Ding et al. use it for documents
    ("Fewer Truncations Improve Language Modeling", 2024). Pieces of one length are placed into all bins with the same
    room at once, so the cost grows with the number of different lengths and rooms, not of pieces.
    """
    order = np.argsort(-length_P, kind="stable")
    values, counts = np.unique(-length_P, return_counts=True)
    bin_P = np.empty(len(length_P), np.int64)
    free: dict[int, list[np.ndarray]] = {}  # room left -> bins with that much room
    rooms: list[int] = []  # the keys of ``free``, ascending
    n_bins = done = 0

    def leave(left: int, bins: np.ndarray) -> None:
        if left > 1 and len(bins):
            if left not in free:
                free[left] = []
                insort(rooms, left)
            free[left].append(bins)

    for length, count in zip((-values).tolist(), counts.tolist(), strict=True):
        while count:
            at = bisect_left(rooms, length)
            has = rooms[at] if at < len(rooms) else room
            each = has // length  # once a piece is in, its bin is the fullest that fits the next
            if at < len(rooms):
                bins, more = np.split(free[has].pop(), [-(-count // each)])
                if len(more):
                    free[has].append(more)
                elif not free[has]:
                    del free[has], rooms[at]
            else:
                bins = np.arange(n_bins, n_bins + -(-count // each))
                n_bins += len(bins)
            taken = min(count, len(bins) * each)
            bin_P[order[done : done + taken]] = np.repeat(bins, each)[:taken]
            n_full = taken // each
            leave(has - each * length, bins[:n_full])
            leave(has - taken % each * length, bins[n_full:])
            done, count = done + taken, count - taken
    return bin_P


def _in_file_order(start_P: np.ndarray, sample_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first piece of each sample, order of the pieces): sorted by their sample's first token, then their own."""
    by_start = np.argsort(start_P, kind="stable")
    samples, first_seen = np.unique(sample_P[by_start], return_index=True)
    place = np.empty(len(samples), np.int64)
    place[np.argsort(first_seen, kind="stable")] = np.arange(len(samples))
    order = by_start[np.argsort(place[sample_P[by_start]], kind="stable")]
    counts = np.bincount(place[sample_P], minlength=len(samples)) if len(samples) else np.zeros(0, np.int64)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), order


def n_cut_in_sequence(starts_D: np.ndarray, n_tokens: int, seq_len: int) -> int:
    """The number of documents that are cut where a file's tokens are laid end to end and cut at every ``seq_len``."""
    ends_D = np.append(starts_D[1:], n_tokens)[: len(starts_D)]
    last_D = np.maximum(ends_D - 2, starts_D)  # a document's last token is only predicted
    return int(np.count_nonzero(starts_D // seq_len != last_D // seq_len))
