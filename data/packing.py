"""From windows of tokens and the document boundaries in them to the arrays of a training step.

Shape letters: B samples, S positions (seq_len), W = S + 1 tokens of a window, F fragments (a document's part in
a sample).
"""

from functools import lru_cache

import numpy as np

from data.batch import IGNORED, PADDING, Batch


def pack(window_BW: np.ndarray, length_B: np.ndarray, row_F: np.ndarray, offset_F: np.ndarray) -> Batch:
    """The batch of B windows, of which ``length_B[b]`` >= 2 tokens are real.

    Fragment f begins at ``offset_F`` of window ``row_F`` (sorted by both; the first of each window at 0, the others at
    a document's first token, before the window's length). What a window holds past its length is overwritten. Tokens
    and targets are cut from one allocation: freeing two of a megabyte each makes the C library return their pages to
    the system, and fetching them again cost more than packing (539 us against 124 us at 64 x 2048 tokens, 2026-11-20,
    one EPYC core).
    """
    n_rows, seq_len = len(window_BW), window_BW.shape[1] - 1
    tokens_BS, targets_BS = np.empty((2, n_rows, seq_len), np.int64)
    tokens_BS[...] = window_BW[:, :-1]
    targets_BS[...] = window_BW[:, 1:]
    start_F = row_F * seq_len + offset_F  # counting through the flat batch
    targets_BS.reshape(-1)[start_F[offset_F > 0] - 1] = IGNORED
    positions_BS, documents_BS = _number_fragments(row_F, start_F, np.flatnonzero(offset_F == 0), (n_rows, seq_len))
    for row in np.flatnonzero(length_B <= seq_len):
        length = length_B[row]
        tokens_BS[row, length:], targets_BS[row, length - 1 :] = 0, IGNORED
        positions_BS[row, length:], documents_BS[row, length:] = 0, PADDING
    return Batch(tokens_BS, targets_BS, positions_BS, documents_BS)


def _number_fragments(
    row_F: np.ndarray, start_F: np.ndarray, first_B: np.ndarray, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """(positions_BS, documents_BS), int32: the distance from each fragment's start, and its number in the row.

    ``first_B`` is each row's first fragment. A document that begins with a window's last token, which is only a
    target, starts where the next row does, and is left with no length.
    """
    ramp = _ramp(shape[0] * shape[1])
    length_F = np.diff(start_F, append=len(ramp))
    number_F = (np.arange(len(row_F)) - first_B[row_F]).astype(np.int32)
    positions = np.repeat(start_F.astype(np.int32), length_F)
    np.subtract(ramp, positions, out=positions)
    return positions.reshape(shape), np.repeat(number_F, length_F).reshape(shape)


@lru_cache(maxsize=4)
def _ramp(n: int) -> np.ndarray:
    """0, 1, ... n - 1; int32. Kept, for a run asks for one or two sizes only; not to be written to."""
    return np.arange(n, dtype=np.int32)
