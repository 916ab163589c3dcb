r"""Token files in Megatron's .bin/.idx format: the format, and a memory-mapped reader.

The format (as NVIDIA Megatron-LM's megatron/core/datasets/indexed_dataset.py reads and writes it), little-endian:

    PREFIX.bin   the token ids of all sequences, one after another
    PREFIX.idx   9 bytes  magic "MMIDIDX\0\0"
                 uint64   version, 1
                 uint8    dtype code of the ids
                 uint64   number of sequences, n
                 uint64   number of document indices, m (the documents + 1)
                 int32[n] tokens in each sequence
                 int64[n] byte offset of each sequence in PREFIX.bin
                 int64[m] number of the first sequence of each document, and last n

Nothing in the .idx is aligned (its arrays begin at byte 34), and numpy copies a whole unaligned array before it
searches it. The reader therefore searches memoryviews with ``bisect``, which reads single elements: opening is O(1) in
time and memory.
"""

import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data.errors import DataError, refuse
from data.remote_tokens import RemoteTokens

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document indices
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # by Megatron's codes
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
# A .bin above this size may not stay in memory: its windows are read one by one, without the system's read-ahead (a
# batch of 64 from a cold sparse file took 11 ms where it took 166 with it, 2026-11-20), and requested beforehand.
LARGE_BYTES = 1 << 30
LOOKED_AT = 1 << 16  # bytes at either end of an .idx that its fingerprint covers
N_SAMPLES, SAMPLE_BYTES = 33, 1 << 13  # pieces hashed of a file that is too large to be hashed whole at each start
REWRITE = "copy the file again, or write it anew"


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id of the vocabulary fits, else int32."""
    return np.dtype(np.uint16 if vocab_size <= 65536 else np.int32)


def bin_path(prefix: Path) -> Path:
    """The path PREFIX.bin (the prefix may itself contain dots)."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path) -> Path:
    """The path PREFIX.idx."""
    return Path(f"{prefix}.idx")


def mask_path(prefix: Path) -> Path:
    """The path PREFIX.mask, of the mask of targets, which exists where not every token is a target (data/masks.py)."""
    return Path(f"{prefix}.mask")


def remote_path(prefix: Path) -> Path:
    """The path PREFIX.remote, which lies in a cache and describes a .bin at a URL."""
    return Path(f"{prefix}.remote")


def is_token_file(prefix: Path | str) -> bool:
    """Whether both PREFIX.bin and PREFIX.idx exist."""
    return os.path.isfile(bin_path(Path(prefix))) and os.path.isfile(idx_path(Path(prefix)))


def fingerprint(path: Path) -> int:
    """A hash of an .idx's size and of the bytes at either end of it."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = xxhash.xxh3_64(str(size).encode())
        digest.update(file.read(LOOKED_AT))
        file.seek(max(0, size - LOOKED_AT))
        digest.update(file.read(LOOKED_AT))
    return digest.intdigest()


def sampled_hash(path: Path) -> int:
    """A hash of a file's size and of pieces spread evenly over it, the first and the last bytes included."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = xxhash.xxh3_64(str(size).encode())
        for number in range(N_SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * number // (N_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.intdigest()


class TokenFile:
    """One token file, memory-mapped.

    ``tokens`` is a read-only array over the whole .bin, or a RemoteTokens that reads it from a URL. Documents are found
    through the .idx, never by looking for an end-of-text id. Raises DataError, naming the file, where .bin and .idx do
    not fit together.
    """

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        self._idx = _map(idx_path(self.prefix))
        idx = memoryview(self._idx or b"")
        self.dtype, self.n_sequences, self.n_indices = _read_header(idx_path(self.prefix), idx)
        pointers_at = HEADER.size + 4 * self.n_sequences
        indices_at = pointers_at + 8 * self.n_sequences
        self._lengths = idx[HEADER.size : pointers_at].cast("i")
        self._pointers = idx[pointers_at:indices_at].cast("q")
        self._indices = idx[indices_at:].cast("q")
        self._bin: mmap.mmap | None = None
        self.is_remote = remote_path(self.prefix).exists()
        if self.is_remote:
            self.tokens: Any = RemoteTokens.of(remote_path(self.prefix), self.dtype)
            n_bytes = self.tokens.n_bytes
        else:
            self._bin = _map(bin_path(self.prefix))
            n_bytes = len(self._bin or b"")
            self.tokens = np.frombuffer(self._bin or b"", self.dtype, n_bytes // self.dtype.itemsize)
        self.n_tokens = n_bytes // self.dtype.itemsize
        self.n_documents = self.n_indices - 1
        self._check_ends(n_bytes)
        self.is_large = self.is_remote or n_bytes > LARGE_BYTES
        if self.is_large and self._bin is not None:
            self._bin.madvise(mmap.MADV_RANDOM)

    @property
    def index_arrays(self) -> tuple[memoryview, memoryview, memoryview]:
        """The .idx: sequences' byte offsets, their lengths, and documents' first sequences. Nothing is read yet."""
        return self._pointers, self._lengths, self._indices

    def document_starts(self, start: int, stop: int) -> list[int]:
        """The tokens in (start, stop) that begin a document, ascending, counted from ``start``; stop <= n_tokens.

        Empty documents begin nothing. Raises DataError where the lengths and offsets of the sequences that hold these
        tokens contradict each other; the rest of the .idx is not checked.
        """
        itemsize = self.dtype.itemsize
        first = bisect_right(self._pointers, start * itemsize, *self._bracket(start * itemsize))
        last = bisect_left(self._pointers, stop * itemsize, first, self._bracket(stop * itemsize)[1])
        pointers = self._checked_pointers(first, last, start * itemsize, stop * itemsize)
        if first == last:
            return []
        if self._indices[first:last].tolist() != list(range(first, last)):  # not one sequence to a document
            pointers = [p for s, p in enumerate(pointers, first) if self._begins_document(s)]
        return list(dict.fromkeys(p // itemsize - start for p in pointers))

    def _checked_pointers(self, first: int, last: int, start: int, stop: int) -> list[int]:
        """The offsets of the sequences [first, last), which begin inside the bytes (start, stop).

        Raises DataError unless each begins where the one before it ends, from the one that holds ``start`` to the one
        that holds the last byte: this shows that the search was right.
        """
        before = max(0, first - 1)
        pointers = self._pointers[before : last + 1].tolist()
        if last == self.n_sequences:
            pointers.append(self.n_tokens * self.dtype.itemsize)
        ends = [
            p + n * self.dtype.itemsize for p, n in zip(pointers, self._lengths[before:last].tolist(), strict=False)
        ]
        if ends != pointers[1:] or pointers != sorted(pointers) or not pointers[0] <= start <= stop <= pointers[-1]:
            raise self._contradiction(before)
        return pointers[first - before : last - before]

    def document_of(self, token: int) -> int:
        """The number, from 0, of the document that a token (counted from the file's start) lies in."""
        sequence = bisect_right(self._pointers, token * self.dtype.itemsize) - 1
        return bisect_right(self._indices, sequence) - 1

    def document_range(self, number: int) -> tuple[int, int]:
        """The tokens [first, stop) of a document, counted from the file's start; 0 <= number < n_documents.

        Raises DataError where the index contradicts itself there.
        """
        sequences = self._indices[number : number + 2].tolist()
        if not 0 <= sequences[0] <= sequences[1] <= self.n_sequences:
            raise self._contradiction(sequences[0])
        ends = (self._pointers[s] // self.dtype.itemsize if s < self.n_sequences else self.n_tokens for s in sequences)
        first, stop = ends
        if not 0 <= first <= stop <= self.n_tokens:
            raise self._contradiction(sequences[0])
        return first, stop

    def prefetch(self, start: int, stop: int) -> None:
        """Begins to read the tokens [start, stop) ahead, if the file is large or remote; returns at once."""
        if self.is_remote:
            self.tokens.prefetch(start, stop)
        if self.is_large and self._bin is not None:
            first = start * self.dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
            self._bin.madvise(mmap.MADV_WILLNEED, first, stop * self.dtype.itemsize - first)

    def release_index(self) -> None:
        """Releases the pages of the .idx that searches mapped: a fault can map 2 MB, and 64 windows the whole."""
        if self._idx is not None:
            self._idx.madvise(mmap.MADV_DONTNEED)

    def _bracket(self, pointer: int) -> tuple[int, int]:
        """(low, high): every sequence before ``low`` begins at or before ``pointer``, every one from ``high`` on after.

        The range is widened from where ``pointer`` would lie among sequences of equal lengths. That touches a page or
        two, whereas a search of the whole .idx would touch, and map, one at each step.
        """
        guess, width = pointer * self.n_sequences // max(1, self.n_tokens * self.dtype.itemsize), 256
        low, high = guess - width, guess + width
        while low > 0 and self._pointers[low] > pointer:
            low, width = low - width, 2 * width
        while high < self.n_sequences and self._pointers[high] <= pointer:
            high, width = high + width, 2 * width
        return max(0, low), min(high, self.n_sequences)

    def all_starts(self) -> np.ndarray:
        """The token that each document begins with, ascending, without empty documents; int64. Reads the whole .idx.

        Raises DataError where the .idx contradicts itself.
        """
        n_bytes = self.n_tokens * self.dtype.itemsize
        pointers, lengths = np.append(np.array(self._pointers), n_bytes), np.array(self._lengths, np.int64)
        wrong = np.flatnonzero((lengths < 0) | (np.diff(pointers) != lengths * self.dtype.itemsize))
        if len(wrong):
            raise self._contradiction(int(wrong[0]))
        indices = np.array(self._indices)
        if (indices[1:] < indices[:-1]).any():  # the first is 0 and the last n_sequences; a difference could overflow
            rule = "must number its documents' sequences within the file, ascending"
            raise refuse(str(idx_path(self.prefix)), rule, REWRITE)
        starts = np.unique(pointers[indices[:-1]] // self.dtype.itemsize)
        return starts[starts < self.n_tokens]

    def _contradiction(self, sequence: int) -> DataError:
        found = f"{idx_path(self.prefix)}: the lengths and offsets near sequence {sequence}"
        return refuse(found, "must say that each begins where the one before it ends", REWRITE)

    def _begins_document(self, sequence: int) -> bool:
        at = bisect_left(self._indices, sequence)
        return at < self.n_indices and self._indices[at] == sequence

    def _check_ends(self, bin_bytes: int) -> None:
        """Raises DataError where the first and last entries of the arrays do not fit the sizes. Takes constant time."""
        idx, named = str(idx_path(self.prefix)), 0
        if self.n_sequences:
            named = self._pointers[-1] + self._lengths[-1] * self.dtype.itemsize
            if self._pointers[0] != 0 or self._lengths[-1] < 0:
                raise refuse(idx, "must place its first sequence at byte 0 and give none a negative length", REWRITE)
        if named != bin_bytes:
            raise refuse(
                str(bin_path(self.prefix)),
                f"has {bin_bytes} bytes where {idx} describes {named}, and the two must be equal",
                REWRITE,
            )
        if self._indices[0] != 0 or self._indices[-1] != self.n_sequences:
            found = f"{idx}: document indices run from {self._indices[0]} to {self._indices[-1]}"
            raise refuse(found, f"but must run from 0 to the number of sequences, {self.n_sequences}", REWRITE)


def _map(path: Path) -> mmap.mmap | None:
    """The file's bytes, mapped read-only; None for an empty file. Raises DataError where it cannot be opened."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else None
    except OSError as error:
        raise refuse(str(path), f"cannot be read ({error.strerror})", "check the path and its permissions") from error


def _read_header(path: Path, idx: memoryview) -> tuple[np.dtype, int, int]:
    """(dtype, sequences, document indices), checked against the .idx file's size."""
    if len(idx) < HEADER.size:
        raise refuse(str(path), f"has {len(idx)} bytes but its header alone takes {HEADER.size}", REWRITE)
    magic, version, code, n_sequences, n_indices = HEADER.unpack_from(idx)
    if magic != MAGIC:
        raise refuse(str(path), f"begins with {magic!r} but a Megatron index begins with {MAGIC!r}", REWRITE)
    if version != VERSION:
        raise refuse(str(path), f"has format version {version} but only version {VERSION} can be read", REWRITE)
    if code not in DTYPES:
        legal = ", ".join(f"{c} ({np.dtype(t).name})" for c, t in DTYPES.items())
        raise refuse(str(path), f"has dtype code {code} but token ids need one of {legal}", REWRITE)
    needed = HEADER.size + 12 * n_sequences + 8 * n_indices
    if len(idx) != needed or n_indices < 1:
        found = f"has {len(idx)} bytes but {n_sequences} sequences and {n_indices} document indices take {needed}"
        raise refuse(str(path), found, REWRITE)
    return np.dtype(DTYPES[code]), n_sequences, n_indices
