r"""Masks of targets, PREFIX.mask: one bit for each token of a token file in which not all tokens are targets.

    8 bytes  magic "RTMASK\0\1"
    uint64   tokens of the file, fingerprint of its .idx, tokens that are targets
    bits     1 for each token that is a target; token t is bit t % 8 of byte t // 8

Little-endian. A token that is no target is read and attended to like any other; predicting it does not count.
In token files without a mask all tokens are targets. Shape letters: B windows, W tokens of a window.
"""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data.errors import reason_of, refuse
from data.pieces import Pieces
from data.tokenfile import REWRITE, TokenFile, fingerprint, idx_path, mask_path

MAGIC = b"RTMASK\x00\x01"
HEADER = struct.Struct("<8s3Q")
MOST_AHEAD = 64  # the most tokens ahead that a module for further tokens predicts
ROWS_AT_ONCE = 256  # windows whose bits are looked at together when targets are counted


class MaskWriter:
    """Writes the bits of a token file, a document at a time, to a file that is open for writing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._file.write(bytes(HEADER.size))
        self._rest = np.zeros(0, bool)  # flags not yet written: fewer than eight, which fill no byte
        self.n_tokens = self.n_targets = 0

    def add(self, is_target: np.ndarray) -> None:
        """Appends one document's mask, a bool for each token."""
        bits = np.concatenate([self._rest, np.asarray(is_target, bool)])
        whole = len(bits) // 8 * 8
        self._file.write(np.packbits(bits[:whole], bitorder="little").tobytes())
        self._rest = bits[whole:]
        self.n_tokens, self.n_targets = self.n_tokens + len(is_target), self.n_targets + int(np.sum(is_target))

    def finish(self, idx: Path) -> None:
        """Writes the remaining bits, and the header with the fingerprint of the .idx to which the mask belongs."""
        self._file.write(np.packbits(self._rest, bitorder="little").tobytes())
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, self.n_tokens, fingerprint(idx), self.n_targets))


def read_mask(file: TokenFile) -> np.ndarray | None:
    """The memory-mapped bits of a token file's mask, uint8; None where it has no mask: all tokens are targets then.

    Raises DataError where the mask is damaged, or belongs to another file.
    """
    path = mask_path(file.prefix)
    if not path.exists():
        return None
    try:
        content = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise refuse(str(path), f"cannot be read ({reason_of(error)})", REWRITE) from error
    if len(content) < HEADER.size or content[: len(MAGIC)].tobytes() != MAGIC:
        raise refuse(str(path), "is no mask of targets", REWRITE)
    _, n_tokens, mark, _ = HEADER.unpack(content[: HEADER.size].tobytes())
    needed = HEADER.size + -(-n_tokens // 8)
    if len(content) != needed:
        raise refuse(str(path), f"has {len(content)} bytes where {n_tokens} tokens take {needed}", REWRITE)
    if (n_tokens, mark) != (file.n_tokens, fingerprint(idx_path(file.prefix))):
        rule = f"is the mask of another file than {idx_path(file.prefix)} is now"
        raise refuse(str(path), rule, "prepare both again, or delete the mask to train on all tokens")
    return np.asarray(content[HEADER.size :])


class Masks:
    """The masks of several token files, by the files' numbers. ``any``: whether one of them has a mask."""

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self._bits = [read_mask(file) for file in files]
        self.any = any(bits is not None for bits in self._bits)

    def has(self, file: int) -> bool:
        """Whether this file has a mask."""
        return self._bits[file] is not None

    def of_range(self, file: int, start: int, stop: int) -> np.ndarray:
        """Bool [stop - start]: whether each of the tokens [start, stop) of a file is a target."""
        bits = self._bits[file]
        if bits is None:
            return np.ones(stop - start, bool)
        found = np.unpackbits(bits[start // 8 : -(-stop // 8)], bitorder="little")
        return found[start % 8 : start % 8 + stop - start].view(bool)

    def ranges(self, file: int, start: int, stop: int) -> list[list[int]]:
        """The targets among the tokens [start, stop) of a file, as half-open ranges [first, stop]."""
        edges = np.diff(self.of_range(file, start, max(start, stop)).astype(np.int8), prepend=0, append=0)
        return (start + np.flatnonzero(edges).reshape(-1, 2)).tolist()

    def of_windows(
        self, width: int, file_B: np.ndarray, start_B: np.ndarray, length_B: np.ndarray, pieces: Pieces | None
    ) -> np.ndarray:
        """Bool (B, W): whether each token of these windows is a target; False past a window's length.

        ``pieces`` are those of the windows where documents are packed; ``start_B`` is then unused.
        """
        files = set(file_B.tolist())
        if pieces is None and len(files) == 1 and min(length_B.tolist()) == width:
            is_target_BW = self._full_windows(files.pop(), start_B, width)
            if is_target_BW is not None:
                return is_target_BW
        is_target_BW = np.zeros((len(file_B), width), bool)
        if pieces is None:
            columns = (np.arange(len(file_B)), file_B, start_B, length_B, np.zeros(len(file_B), np.int64))
        else:
            columns = (pieces.row_P, pieces.file_P, pieces.start_P, pieces.length_P, pieces.offset_P)
        for row, file, start, length, offset in zip(*(column.tolist() for column in columns), strict=True):
            is_target_BW[row, offset : offset + length] = self.of_range(file, start, start + length)
        return is_target_BW

    def _full_windows(self, file: int, start_B: np.ndarray, width: int) -> np.ndarray | None:
        """``of_windows`` for full windows of one file, their bits gathered at once; None near the end of the mask."""
        bits = self._bits[file]
        if bits is None:
            return np.ones((len(start_B), width), bool)
        n_bytes = (width + 14) // 8  # of a window that begins with the last bit of a byte
        byte_B, shifts = start_B >> 3, (start_B & 7).tolist()
        if int(byte_B.max()) + n_bytes > len(bits):
            return None
        all_windows = np.ndarray((len(bits) - n_bytes + 1, n_bytes), np.uint8, bits, strides=(1, 1))
        flags = np.unpackbits(all_windows[byte_B], axis=1, bitorder="little").view(bool)
        if min(shifts) == max(shifts):  # as where seq_len is a multiple of 8
            return flags[:, shifts[0] : shifts[0] + width]
        return np.array([row[shift : shift + width] for row, shift in zip(flags, shifts, strict=True)])


def count_ahead(is_target_BW: np.ndarray, row_F: np.ndarray, offset_F: np.ndarray) -> np.ndarray:
    """int64 [MOST_AHEAD + 2]: entry n counts the targets with n tokens before them in their part of a document.

    The last entry counts those with MOST_AHEAD + 1 or more. The document's part f begins at token ``offset_F[f]`` of
    window ``row_F[f]``.
    """
    n_rows, width = is_target_BW.shape
    start_F = row_F * width + offset_F
    length_F = np.append(start_F[1:], n_rows * width) - start_F
    before = np.arange(n_rows * width) - np.repeat(start_F, length_F)
    return np.bincount(np.minimum(before[is_target_BW.reshape(-1)], MOST_AHEAD + 1), minlength=MOST_AHEAD + 2)
