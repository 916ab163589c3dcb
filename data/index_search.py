"""Finding where documents begin in many windows of one token file, with numpy for all windows at once.

Shape letters: B windows, P looked-up entries of the index, F documents that begin in them.
"""

import numpy as np

from data.tokenfile import TokenFile

WIDTH = 256  # entries first searched on either side of a window's place among sequences of equal lengths


class Column:
    """Look-ups in one array of an .idx, which is not aligned: numpy itself would copy all of it to look up a part."""

    def __init__(self, entries: memoryview) -> None:
        self.dtype = np.dtype(entries.format)
        self.size = len(entries)
        self._rows = np.frombuffer(entries.cast("B"), np.uint8).reshape(-1, self.dtype.itemsize)

    def at(self, places_P: np.ndarray) -> np.ndarray:
        """The entries at these places, int64; places past the end give the last entry."""
        rows = self._rows.take(places_P, axis=0, mode="clip")  # a tenth of the time of indexing
        return rows.view(self.dtype)[:, 0].astype(np.int64)

    def count_up_to(self, value_B: np.ndarray, guess_B: np.ndarray) -> np.ndarray:
        """The number of entries, which ascend, that are at most each value; ``guess_B`` is the approximate answer."""
        low_B, high_B = np.maximum(guess_B - WIDTH, 0), np.minimum(guess_B + WIDTH, self.size)
        step = WIDTH
        while (wrong_B := (low_B > 0) & (self.at(low_B) > value_B)).any():
            low_B, step = np.where(wrong_B, np.maximum(low_B - step, 0), low_B), 2 * step
        step = WIDTH
        while (wrong_B := (high_B < self.size) & (self.at(high_B) <= value_B)).any():
            high_B, step = np.where(wrong_B, np.minimum(high_B + step, self.size), high_B), 2 * step
        while (open_B := low_B < high_B).any():
            middle_B = (low_B + high_B) // 2
            is_before_B = self.at(middle_B) <= value_B
            low_B = np.where(open_B & is_before_B, middle_B + 1, low_B)
            high_B = np.where(open_B & ~is_before_B, middle_B, high_B)
        return low_B


def find_starts(file: TokenFile, start_B: np.ndarray, stop_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row_F, offset_F): the window, and the offset from its start, of each document that begins inside a window.

    Window b is the tokens [start_B[b], stop_B[b]) of the file; a document that begins with the window's first token is
    not listed. Sorted by window. Raises DataError where the .idx contradicts itself near a window.
    """
    pointers, lengths, indices = (Column(each) for each in file.index_arrays)
    size, n_bytes = file.dtype.itemsize, file.n_tokens * file.dtype.itemsize
    guess_B = (start_B / max(1, file.n_tokens) * pointers.size).astype(np.int64)
    first_B = pointers.count_up_to(start_B * size, guess_B)
    last_B = np.maximum(first_B, pointers.count_up_to(stop_B * size - 1, first_B))
    # The sequences that begin inside each window, the one before them, and the one after.
    before_B = np.maximum(first_B - 1, 0)
    count_B = last_B - before_B + 1
    row_P = np.repeat(np.arange(len(start_B)), count_B)
    place_P = np.arange(len(row_P)) + (before_B - np.cumsum(count_B) + count_B)[row_P]
    pointer_P = np.where(place_P < pointers.size, pointers.at(place_P), n_bytes)
    end_P = pointer_P + size * lengths.at(place_P)
    is_sound_P = np.append((end_P[:-1] == pointer_P[1:]) & (pointer_P[:-1] <= pointer_P[1:]), True)
    is_sound_P |= place_P == last_B[row_P]
    is_sound_P &= (place_P > before_B[row_P]) | (pointer_P <= start_B[row_P] * size)
    is_sound_P &= (place_P < last_B[row_P]) | (pointer_P >= stop_B[row_P] * size)
    is_inside_P = (place_P >= first_B[row_P]) & (place_P < last_B[row_P])
    is_document_P = (place_P < indices.size) & (indices.at(place_P) == place_P)
    single = np.unique(row_P[~is_sound_P | (is_inside_P & ~is_document_P)])
    kept_P = is_inside_P & ~np.isin(row_P, single)
    return _with_single(
        file, row_P[kept_P], pointer_P[kept_P] // size - start_B[row_P[kept_P]], single, start_B, stop_B
    )


def _with_single(
    file: TokenFile,
    row_F: np.ndarray,
    offset_F: np.ndarray,
    single: np.ndarray,
    start_B: np.ndarray,
    stop_B: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """The starts found so far, with those of the windows ``single``, each searched by itself, added in order.

    Contradictions in the .idx raise DataError there. Empty documents begin nothing, so equal starts count once.
    """
    is_new_F = np.append(True, (row_F[1:] != row_F[:-1]) | (offset_F[1:] != offset_F[:-1]))[: len(row_F)]
    rows, offsets = [row_F[is_new_F]], [offset_F[is_new_F]]
    for row in single.tolist():
        starts = file.document_starts(int(start_B[row]), int(stop_B[row]))
        rows.append(np.full(len(starts), row))
        offsets.append(np.array(starts, np.int64))
    row_F, offset_F = np.concatenate(rows), np.concatenate(offsets)
    order = np.argsort(row_F, kind="stable")
    return row_F[order], offset_F[order]
