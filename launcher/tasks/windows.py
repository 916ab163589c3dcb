"""Windows of tokens whose last ones are scored, and rows of one length that hold several windows.

Shape letters: R rows, S sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.batch import IGNORED, PADDING
from data.packing import best_fit


@dataclass(frozen=True)
class Window:
    """Tokens of one forward pass: all but the last are the input, and the last ``n_scored`` are scored as targets."""

    tokens: tuple[int, ...]
    n_scored: int

    @property
    def n_inputs(self) -> int:
        """The number of tokens that enter the model."""
        return len(self.tokens) - 1


def window_of(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Window:
    """The window that scores a continuation after its context; the context loses its first tokens if both are too long.

    The context must have at least one token, and the continuation 1 to ``max_length``.
    """
    assert context and 1 <= len(continuation) <= max_length
    tokens = [*context, *continuation]
    return Window(tuple(tokens[-(max_length + 1) :]), len(continuation))


def rolling_windows(tokens: Sequence[int], prefix: int, max_length: int) -> Iterator[Window]:
    """Windows that together score each token of a text once; the first token is predicted after ``prefix``.

    The text is cut as the harness does it: in pieces of ``max_length`` tokens, each preceded by the last token of the
    piece before it. The last piece may be shorter; it is preceded by as many earlier tokens as there is room for.
    """
    for start in range(0, len(tokens), max_length):
        stop = min(start + max_length, len(tokens))
        before = [prefix, *tokens][max(0, stop - max_length) : start + 1]
        yield Window((*before, *tokens[start:stop]), stop - start)


@dataclass(frozen=True)
class Rows:
    """Windows laid out in rows of one length; each is a document of its own, so attention does not cross windows.

    Targets that are not scored are ``IGNORED``. ``places`` holds each window's row and first scored column.
    """

    tokens_RS: np.ndarray  # all four arrays are int64
    targets_RS: np.ndarray
    positions_RS: np.ndarray
    documents_RS: np.ndarray
    places: tuple[tuple[int, int], ...]

    @property
    def has_padding(self) -> bool:
        """Whether some position holds no token."""
        return bool((self.documents_RS == PADDING).any())


def packed_rows(windows: Sequence[Window], seq_len: int) -> Rows:
    """The windows packed into rows of ``seq_len`` tokens by best-fit decreasing; deterministic."""
    row_of_window = best_fit(np.array([window.n_inputs for window in windows], np.int64), seq_len)
    return _laid_out(windows, row_of_window, seq_len)


def padded_rows(windows: Sequence[Window]) -> Rows:
    """One row for each window, padded to the length of the longest."""
    return _laid_out(windows, np.arange(len(windows)), max(window.n_inputs for window in windows))


def _laid_out(windows: Sequence[Window], row_of_window: np.ndarray, seq_len: int) -> Rows:
    shape = int(row_of_window.max()) + 1, seq_len
    tokens_RS, positions_RS = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    targets_RS, documents_RS = np.full(shape, IGNORED, np.int64), np.full(shape, PADDING, np.int64)
    used_R, documents_R = np.zeros(shape[0], np.int64), np.zeros(shape[0], np.int64)
    places = []
    for window, row in zip(windows, row_of_window.tolist(), strict=True):
        start, stop = int(used_R[row]), int(used_R[row]) + window.n_inputs
        scored = stop - window.n_scored
        tokens_RS[row, start:stop] = window.tokens[:-1]
        targets_RS[row, scored:stop] = window.tokens[-window.n_scored :]
        positions_RS[row, start:stop] = np.arange(window.n_inputs)
        documents_RS[row, start:stop] = documents_R[row]
        places.append((row, scored))
        used_R[row], documents_R[row] = stop, documents_R[row] + 1
    return Rows(tokens_RS, targets_RS, positions_RS, documents_RS, tuple(places))
