"""A batch of samples for a training step: windows of tokens, and arrays derived from where documents begin.

Shape letters: B samples of the batch, S positions of a sample, W = S + 1 tokens of a window, F fragments (a document's
part in a sample), L parts that are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

IGNORED = -100  # a target that does not count; torch's cross_entropy ignores it by default
PADDING = -1  # the document number of a position that holds no token
NOTHING = np.empty((3, 0), np.int64)  # no parts of documents; shared, and so made read-only
NOTHING.flags.writeable = False

FindFragments = Callable[[], tuple[np.ndarray, np.ndarray]]


@dataclass(eq=False)
class Batch:
    """Packed samples as numpy arrays, all of shape [B, S].

    Each array is computed from the windows and the documents' boundaries when it is first accessed, and cached, so
    unused arrays cost nothing. Writing into one array changes no other.

    A position whose target is ``IGNORED`` but whose document is not ``PADDING`` is a real token (the last of its
    document, or of its shard): it is routed and attended to, but predicts nothing. Tokens of documents that are left
    out are padding, wherever they lie; the other documents keep their numbers.
    """

    # token ids in the token file's type, including the one after the last position; 0 past the window's length
    window_BW: np.ndarray
    length_B: np.ndarray  # int64: how many tokens of each window are real, at least 2
    # (row_F, offset_F): each fragment's window and its first token in it, sorted by both; the first of a window is at 0
    find_fragments: FindFragments
    # int64 [3, L]: window, first token and end of each part of a document that counts as padding
    left_out_L: np.ndarray = field(default_factory=lambda: NOTHING)
    is_target_BW: np.ndarray | None = None  # bool: whether predicting each token of a window counts; None: each does
    _room: np.ndarray | None = field(default=None, init=False, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(number of samples B, positions of each S)."""
        return self.window_BW.shape[0], self.window_BW.shape[1] - 1

    def _part_of_room(self, number: int) -> np.ndarray:
        """int64 [B, S], uninitialized: memory for tokens (0), targets (1) or, with a mask, next tokens (2).

        They are cut from one allocation: freeing two of a megabyte each makes the C library return their pages to the
        system, and fetching them again cost more than filling them (539 us against 124 us at 64 x 2048 tokens,
        2026-11-20, one EPYC core). Until targets are asked for, their part is address space alone.
        """
        if self._room is None:
            self._room = np.empty((2 if self.is_target_BW is None else 3, *self.shape), np.int64)
        return self._room[number]

    @cached_property
    def tokens_BS(self) -> np.ndarray:
        """int64: input token ids; 0 in padding."""
        tokens_BS = self._part_of_room(0)
        tokens_BS[...] = self.window_BW[:, :-1]
        for row, first, stop in self.left_out_L.T.tolist():
            tokens_BS[row, first:stop] = 0
        return tokens_BS

    @cached_property
    def targets_BS(self) -> np.ndarray:
        """int64: the next token of the same document; IGNORED where there is none, or where it is not a target."""
        targets_BS = self._part_of_room(1)
        if self.is_target_BW is None:
            return self._fill_next(targets_BS)
        # By arithmetic: a choice by np.where costs a branch misprediction at every second token of a ragged mask.
        next_BS = self.next_BS
        assert next_BS is not None
        np.subtract(next_BS, IGNORED, out=targets_BS)
        targets_BS *= self.is_target_BW[:, 1:]
        targets_BS += IGNORED
        return targets_BS

    @cached_property
    def next_BS(self) -> np.ndarray | None:
        """int64: the next token of the same document, target or not; IGNORED where there is none.

        None where every such token is a target: ``targets_BS`` holds the same numbers then.
        """
        return self._fill_next(self._part_of_room(2)) if self.is_target_BW is not None else None

    def _fill_next(self, targets_BS: np.ndarray) -> np.ndarray:
        targets_BS[...] = self.window_BW[:, 1:]
        _, offset_F, start_F = self.fragments
        targets_BS.reshape(-1)[start_F[offset_F > 0] - 1] = IGNORED
        for row in self._short_rows:
            targets_BS[row, self.length_B[row] - 1 :] = IGNORED
        for row, first, stop in self.left_out_L.T.tolist():
            targets_BS[row, first:stop] = IGNORED
        return targets_BS

    @property
    def positions_BS(self) -> np.ndarray:
        """int32: position within the document's part that lies in this sample; 0 in padding."""
        return self._numbers[0]

    @property
    def documents_BS(self) -> np.ndarray:
        """int32: 0, 1, 2... number of the document within the sample; PADDING in padding."""
        return self._numbers[1]

    @property
    def has_padding(self) -> bool:
        """Whether any position holds no token; found from the lengths and left-out parts, without computing arrays."""
        seq_len = self.shape[1]
        return bool((self.length_B < seq_len).any() or (self.left_out_L[1] < seq_len).any())

    @cached_property
    def is_padding_BS(self) -> np.ndarray | None:
        """bool: whether a position holds no token; None where every position holds one."""
        if not self.has_padding:
            return None
        is_padding_BS = np.zeros(self.shape, bool)
        for row in self._short_rows:
            is_padding_BS[row, self.length_B[row] :] = True
        for row, first, stop in self.left_out_L.T.tolist():
            is_padding_BS[row, first:stop] = True
        return is_padding_BS

    @property
    def boundaries(self) -> np.ndarray:
        """int32: where documents begin among the B * S positions, ascending, followed by B * S itself.

        It is found from the fragments alone. Each stretch of padding within a row counts as a document.
        """
        row_F, offset_F, start_F = self.fragments
        seq_len = self.shape[1]
        is_padding_F = np.zeros(len(row_F), bool)
        if self.left_out_L.shape[1]:
            row_L, first_L, _ = self.left_out_L
            is_padding_F = np.isin(row_F * (seq_len + 1) + offset_F, row_L * (seq_len + 1) + first_L)
        is_input_F = offset_F < seq_len
        row_P = np.flatnonzero(self.length_B < seq_len)
        start_R = np.concatenate([start_F[is_input_F], row_P * seq_len + self.length_B[row_P]])
        is_padding_R = np.concatenate([is_padding_F[is_input_F], np.ones(len(row_P), bool)])
        order = np.argsort(start_R)
        start_R, is_padding_R = start_R[order], is_padding_R[order]
        goes_on_R = is_padding_R & np.append(False, is_padding_R[:-1]) & (start_R % seq_len > 0)
        return np.append(start_R[~goes_on_R], len(self.length_B) * seq_len).astype(np.int32)

    @cached_property
    def fragments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(row_F, offset_F, start_F): each fragment's window and first token, and its place in the flattened batch."""
        row_F, offset_F = self.find_fragments()
        return row_F, offset_F, row_F * self.shape[1] + offset_F

    @cached_property
    def _short_rows(self) -> np.ndarray:
        """The samples with padding at their end, or without a token after the last position."""
        return np.flatnonzero(self.length_B <= self.shape[1])

    @cached_property
    def _numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """(positions_BS, documents_BS), int32: the distance from each fragment's start, and its number in the sample.

        A document that begins with a window's last token, which is only a target, starts where the next row does, and
        so gets no position.
        """
        row_F, offset_F, start_F = self.fragments
        ramp = _ramp(self.shape[0] * self.shape[1])
        length_F = np.empty_like(start_F)
        np.subtract(start_F[1:], start_F[:-1], out=length_F[:-1])
        length_F[-1:] = len(ramp) - start_F[-1:]
        number_F = np.arange(len(row_F), dtype=np.int32) - np.flatnonzero(offset_F == 0).astype(np.int32)[row_F]
        positions, documents = np.repeat(start_F.astype(np.int32), length_F), np.repeat(number_F, length_F)
        np.subtract(ramp, positions, out=positions)
        positions_BS, documents_BS = positions.reshape(self.shape), documents.reshape(self.shape)
        for row in self._short_rows:
            positions_BS[row, self.length_B[row] :], documents_BS[row, self.length_B[row] :] = 0, PADDING
        for row, first, stop in self.left_out_L.T.tolist():
            positions_BS[row, first:stop], documents_BS[row, first:stop] = 0, PADDING
        return positions_BS, documents_BS


@lru_cache(maxsize=4)
def _ramp(n: int) -> np.ndarray:
    """0, 1, ... n - 1; int32. Cached, since a run needs one or two sizes only: do not write into it."""
    return np.arange(n, dtype=np.int32)
