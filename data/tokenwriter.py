"""Writes one token file, a document at a time, in constant memory."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from data.manifest import FileRecord, hash_file, partial_suffix, sync_folder
from data.tokenfile import CODES, HEADER, MAGIC, VERSION, bin_path, idx_path

CHUNK = 1 << 16  # entries of the .idx in memory at once


class TokenFileWriter:
    """Documents in, PREFIX.bin and PREFIX.idx out, each one sequence of its own.

    Both files are written under other names; ``finish`` syncs and renames them, ``abort`` deletes them, and a killed
    process leaves nothing under PREFIX. The lengths go straight to their place in the .idx; what precedes and follows
    them there is written by ``finish``. Raises OSError where the disk is full.
    """

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self._paths = bin_path(prefix), idx_path(prefix)
        self._partials = tuple(path.with_name(f"{path.name}.{partial_suffix()}") for path in self._paths)
        self._bin: BinaryIO = self._partials[0].open("wb")
        self._idx: BinaryIO = self._partials[1].open("w+b")
        self._idx.seek(HEADER.size)
        self._hash = xxhash.xxh3_128()
        self.n_tokens = self.n_documents = 0
        self.largest_id = -1

    def add(self, ids: Sequence[int] | np.ndarray) -> None:
        """Appends one document (fewer than 2**31 tokens)."""
        wide = np.asarray(ids, np.int64)
        if len(wide):
            largest = int(wide.max())
            assert 0 <= int(wide.min()) <= largest <= np.iinfo(self.dtype).max, "the ids do not fit the dtype"
            self.largest_id = max(self.largest_id, largest)
        data = wide.astype(self.dtype).tobytes()
        self._bin.write(data)
        self._hash.update(data)
        self._idx.write(np.int32(len(wide)).tobytes())
        self.n_tokens += len(wide)
        self.n_documents += 1

    def finish(self) -> FileRecord:
        """Completes both files under their own names, durably."""
        self._write_index()
        for file, partial, path in zip((self._bin, self._idx), self._partials, self._paths, strict=True):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            partial.rename(path)
        sync_folder(self.prefix.parent)
        return FileRecord(
            name=self.prefix.name,
            n_tokens=self.n_tokens,
            n_documents=self.n_documents,
            largest_id=self.largest_id,
            bin_bytes=self._paths[0].stat().st_size,
            idx_bytes=self._paths[1].stat().st_size,
            bin_xxh3=self._hash.hexdigest(),
            idx_xxh3=hash_file(self._paths[1]),
        )

    def abort(self) -> None:
        """Deletes what was written. Does nothing after ``finish``."""
        for partial in self._partials:
            partial.unlink(missing_ok=True)
        for file in (self._bin, self._idx):
            with suppress(OSError):  # flushing the rest fails where the disk is full; the file is gone already
                file.close()

    def _write_index(self) -> None:
        n = self.n_documents
        self._idx.seek(0)
        self._idx.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], n, n + 1))
        pointer = 0
        for start in range(0, n, CHUNK):
            self._idx.seek(HEADER.size + 4 * start)
            lengths = np.frombuffer(self._idx.read(4 * min(CHUNK, n - start)), np.int32).astype(np.int64)
            ends = pointer + np.cumsum(lengths * self.dtype.itemsize)
            self._idx.seek(HEADER.size + 4 * n + 8 * start)
            self._idx.write((ends - lengths * self.dtype.itemsize).tobytes())
            pointer = int(ends[-1])
        self._idx.seek(HEADER.size + 12 * n)
        for start in range(0, n + 1, CHUNK):
            self._idx.write(np.arange(start, min(start + CHUNK, n + 1), dtype=np.int64).tobytes())
