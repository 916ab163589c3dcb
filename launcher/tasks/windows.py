"""What is scored: some tokens, the last ones of which are predicted; and rows of one length that hold them.

Shape letters: R rows, S sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from data.batch import IGNORED, PADDING
from data.packing import best_fit


@dataclass(frozen=True)
class Window:
    """One pass's tokens. All but the last enter the model, all but the first are predicted, and the last are scored."""

    tokens: tuple[int, ...]
    n_scored: int

    @property
    def n_inputs(self) -> int:
        """Tokens that enter the model."""
        return len(self.tokens) - 1


def window_of(context: Sequence[int], continuation: Sequence[int], max_length: int) -> Window:
    """The continuation after its context, of which the first tokens are left out where both are too long.

    At least one token of the context is there, and the continuation has 1 to ``max_length`` tokens.
    """
    assert context and 1 <= len(continuation) <= max_length
    tokens = [*context, *continuation]
    return Window(tuple(tokens[-(max_length + 1) :]), len(continuation))


def rolling_windows(tokens: Sequence[int], prefix: int, max_length: int) -> Iterator[Window]:
    """All of a text's tokens, each predicted once after as many as there is room for; the first one after ``prefix``.

    As the harness cuts texts: in pieces of ``max_length`` tokens, each after the last token of the piece before it; the
    last piece is shorter, and has as much of the text before it as there is room for.
    """
    for start in range(0, len(tokens), max_length):
        stop = min(start + max_length, len(tokens))
        before = [prefix, *tokens][max(0, stop - max_length) : start + 1]
        yield Window((*before, *tokens[start:stop]), stop - start)


@dataclass(frozen=True)
class Rows:
    """Windows in rows of one length, each a document of its own: nothing is attended to across them.

    Targets that are not scored are ``IGNORED``. ``places`` has, for each window, its row and its first scored column.
    """

    tokens_RS: np.ndarray  # int64, as the others
    targets_RS: np.ndarray
    positions_RS: np.ndarray
    documents_RS: np.ndarray
    places: tuple[tuple[int, int], ...]

    @property
    def has_padding(self) -> bool:
        """Whether some position holds no token."""
        return bool((self.documents_RS == PADDING).any())


def packed_rows(windows: Sequence[Window], seq_len: int) -> Rows:
    """The windows in as few rows of ``seq_len`` tokens as best-fit decreasing finds. A function of its arguments."""
    row_of_window = best_fit(np.array([window.n_inputs for window in windows], np.int64), seq_len)
    return _laid_out(windows, row_of_window, seq_len)


def padded_rows(windows: Sequence[Window]) -> Rows:
    """A row for each window, each as long as the longest."""
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
