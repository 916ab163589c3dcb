"""Where documents begin within windows of tokens, found from the token files' indices alone.

Shape letters: B windows, F fragments (the parts of documents that they hold).
"""

from collections.abc import Sequence

import numpy as np

from data.tokenfile import TokenFile

# Up to this many documents, their starts are held in memory (8 MB) and all windows are searched at once: 2 us for 64
# windows where searching the mapped files takes 56 (2026-11-20, one EPYC core). Beyond it, memory must not grow.
MAX_DOCUMENTS_IN_MEMORY = 1 << 20


class Boundaries:
    """The document starts of several token files."""

    def __init__(self, files: Sequence[TokenFile], max_in_memory: int = MAX_DOCUMENTS_IN_MEMORY) -> None:
        self._files = files
        self._base = np.cumsum([0, *(file.n_tokens for file in files)])  # of each file, were they all laid end to end
        self._starts: np.ndarray | None = None
        if files and sum(file.n_sequences + file.n_documents for file in files) <= 2 * max_in_memory:
            bases = self._base[:-1].tolist()
            self._starts = np.concatenate([b + file.all_starts() for b, file in zip(bases, files, strict=True)])

    def find(self, file_B: np.ndarray, start_B: np.ndarray, length_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row_F, offset_F), int64: each fragment's window and its first token in it, sorted by both.

        Window b holds ``length_B[b]`` tokens of file ``file_B[b]`` from token ``start_B[b]`` on. It begins with a
        fragment at 0, and each document that begins inside it begins another. Raises DataError where an index
        contradicts itself.
        """
        if self._starts is None:
            return self._search_files(file_B, start_B, length_B)
        start_B = self._base[file_B] + start_B
        first_B = np.searchsorted(self._starts, start_B, side="right") - 1
        count_B = np.searchsorted(self._starts, start_B + length_B, side="left") - first_B
        row_F = np.repeat(np.arange(len(file_B)), count_B)
        which_F = np.arange(len(row_F)) + (first_B - np.cumsum(count_B) + count_B)[row_F]
        return row_F, np.maximum(self._starts[which_F] - start_B[row_F], 0)

    def _search_files(
        self, file_B: np.ndarray, start_B: np.ndarray, length_B: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        windows = zip(file_B.tolist(), start_B.tolist(), length_B.tolist(), strict=True)
        found = [[0, *self._files[file].document_starts(start, start + length)] for file, start, length in windows]
        for number in set(file_B.tolist()):
            self._files[number].release_index()
        row_F = np.repeat(np.arange(len(found)), [len(offsets) for offsets in found])
        return row_F, np.array([offset for offsets in found for offset in offsets], np.int64)
