"""Finding where documents begin within windows of tokens, from the token files' indices alone.

Shape letters: B windows, F fragments (the parts of documents that they hold).
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from data.batch import FindFragments
from data.index_search import find_starts
from data.tokenfile import TokenFile

# Up to this many documents, their starts are held in memory (8 MB) and all windows are searched at once: 2 us for 64
# windows where searching the mapped files takes 56 (2026-11-20, one EPYC core). Beyond it, memory must not grow.
MAX_DOCUMENTS_IN_MEMORY = 1 << 20
# From so many windows on numpy searches the mapped files for all at once: 15,360 among five million documents take
# 12 ms where one after another takes 149 (2026-11-23, one of two busy EPYC cores).
MANY_WINDOWS = 64


class Boundaries:
    """The document starts of several token files, searched in memory, or in the mapped files where they are many."""

    def __init__(self, files: Sequence[TokenFile], max_in_memory: int = MAX_DOCUMENTS_IN_MEMORY) -> None:
        self._files = files
        self._base = np.cumsum([0, *(file.n_tokens for file in files)])  # files' first tokens, if laid end to end
        self._starts: np.ndarray | None = None
        if files and sum(file.n_sequences + file.n_documents for file in files) <= 2 * max_in_memory:
            bases = self._base[:-1].tolist()
            self._starts = np.concatenate([b + file.all_starts() for b, file in zip(bases, files, strict=True)])

    def finder(self, file_B: np.ndarray, start_B: np.ndarray, length_B: np.ndarray) -> FindFragments:
        """A function that returns ``find``'s answer for these windows.

        Starts in memory were checked when the files were opened, so they are searched when the function is called.
        Mapped files are searched now, so that an index that contradicts itself raises DataError here.
        """
        find = partial(self.find, file_B, start_B, length_B)
        if self._starts is not None:
            return find
        found = find()
        return lambda: found

    def find(self, file_B: np.ndarray, start_B: np.ndarray, length_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row_F, offset_F), int64: each fragment's window and its first token in it, sorted by both.

        Window b holds ``length_B[b]`` tokens of file ``file_B[b]`` from token ``start_B[b]`` on. It begins with a
        fragment at 0, and each document that begins inside it begins another. Raises DataError where an index
        contradicts itself.
        """
        if self._starts is None:
            return self._search_files(file_B, start_B, length_B)
        start_B = self._base[file_B] + start_B
        first_B = self._starts.searchsorted(start_B, side="right") - 1
        count_B = self._starts.searchsorted(start_B + length_B, side="left") - first_B
        row_F = np.arange(len(file_B)).repeat(count_B)
        which_F = np.arange(len(row_F)) + (first_B - count_B.cumsum() + count_B)[row_F]
        return row_F, np.maximum(self._starts[which_F] - start_B[row_F], 0)

    def _search_files(
        self, file_B: np.ndarray, start_B: np.ndarray, length_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        if len(file_B) >= MANY_WINDOWS:
            return self._search_many(file_B, start_B, start_B + length_B)
        windows = zip(file_B.tolist(), start_B.tolist(), length_B.tolist(), strict=True)
        found = [[0, *self._files[file].document_starts(start, start + length)] for file, start, length in windows]
        for number in set(file_B.tolist()):
            self._files[number].release_index()
        row_F = np.repeat(np.arange(len(found)), [len(offsets) for offsets in found])
        return row_F, np.array([offset for offsets in found for offset in offsets], np.int64)

    def _search_many(
        self, file_B: np.ndarray, start_B: np.ndarray, stop_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        rows, offsets = [np.arange(len(file_B))], [np.zeros(len(file_B), np.int64)]  # each window begins with a part
        for number in np.unique(file_B).tolist():
            (row_W,) = np.nonzero(file_B == number)
            row_F, offset_F = find_starts(self._files[number], start_B[row_W], stop_B[row_W])
            self._files[number].release_index()
            rows.append(row_W[row_F])
            offsets.append(offset_F)
        row_F, offset_F = np.concatenate(rows), np.concatenate(offsets)
        order = np.argsort(row_F, kind="stable")
        return row_F[order], offset_F[order]
