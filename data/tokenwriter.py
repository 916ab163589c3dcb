"""Writing a token file, one document at a time, in constant memory."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from data.manifest import FileRecord, hash_file
from data.masks import MaskWriter
from data.partial import partial_suffix, sync_folder
from data.tokenfile import CODES, HEADER, MAGIC, VERSION, bin_path, idx_path, mask_path

CHUNK = 1 << 16  # entries of the .idx in memory at once


class TokenFileWriter:
    """Writes documents into PREFIX.bin and PREFIX.idx, each document as one sequence.

    All files are written under temporary names; ``finish`` syncs and renames them, ``abort`` deletes them, and a killed
    process leaves nothing under PREFIX. Lengths are written to their place in the .idx at once, and the rest of it by
    ``finish``. Raises OSError where the disk is full.
    """

    def __init__(self, prefix: Path, dtype: np.dtype, *, has_mask: bool = False) -> None:
        """``has_mask``: also writes PREFIX.mask, which says which tokens are targets."""
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self._paths = (bin_path(prefix), idx_path(prefix), *([mask_path(prefix)] if has_mask else []))
        self._partials = tuple(path.with_name(f"{path.name}.{partial_suffix()}") for path in self._paths)
        self._bin: BinaryIO = self._partials[0].open("wb")
        self._idx: BinaryIO = self._partials[1].open("w+b")
        self._files = [self._bin, self._idx]
        self._mask: MaskWriter | None = None
        if has_mask:
            self._files.append(self._partials[2].open("wb"))
            self._mask = MaskWriter(self._files[2])
        self._idx.seek(HEADER.size)
        self._hash = xxhash.xxh3_128()
        self.n_tokens = self.n_documents = 0
        self.largest_id = -1

    def add(self, ids: Sequence[int] | np.ndarray, is_target: np.ndarray | None = None) -> None:
        """Appends one document of fewer than 2**31 tokens. ``is_target`` (bool) says which are targets; None: all."""
        wide = np.asarray(ids, np.int64)
        if len(wide):
            largest = int(wide.max())
            assert 0 <= int(wide.min()) <= largest <= np.iinfo(self.dtype).max, "the ids do not fit the dtype"
            self.largest_id = max(self.largest_id, largest)
        data = wide.astype(self.dtype).tobytes()
        self._bin.write(data)
        self._hash.update(data)
        self._idx.write(np.int32(len(wide)).tobytes())
        if self._mask is not None:
            self._mask.add(is_target if is_target is not None else np.ones(len(wide), bool))
        self.n_tokens += len(wide)
        self.n_documents += 1

    def finish(self) -> FileRecord:
        """Completes the files and renames them, durably; returns their record."""
        self._write_index()
        self._idx.flush()
        masked: dict[str, Any] = {}
        if self._mask is not None:
            self._mask.finish(self._partials[1])
            masked["n_targets"] = self._mask.n_targets
        for file, partial, path in zip(self._files, self._partials, self._paths, strict=True):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            partial.rename(path)
        sync_folder(self.prefix.parent)
        if masked:
            masked |= {"mask_bytes": self._paths[2].stat().st_size, "mask_xxh3": hash_file(self._paths[2])}
        return FileRecord(
            name=self.prefix.name,
            n_tokens=self.n_tokens,
            n_documents=self.n_documents,
            largest_id=self.largest_id,
            bin_bytes=self._paths[0].stat().st_size,
            idx_bytes=self._paths[1].stat().st_size,
            bin_xxh3=self._hash.hexdigest(),
            idx_xxh3=hash_file(self._paths[1]),
            **masked,
        )

    def abort(self) -> None:
        """Deletes what was written. Does nothing after ``finish``."""
        for partial in self._partials:
            partial.unlink(missing_ok=True)
        for file in self._files:
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
