"""The token ids of a .bin at a URL, read through a cache of blocks."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from data.block_cache import BLOCK_BYTES, BlockCache
from data.errors import reason_of, refuse
from data.prefetch import Prefetcher
from data.remote import ObjectRecord, RemoteObject


class RemoteTokens:
    """The token ids of a .bin at a URL, read through the cache. Indexed by a slice, a place or an array of places."""

    def __init__(self, record: ObjectRecord, cache: Path, dtype: np.dtype) -> None:
        self.dtype, self.itemsize = dtype, dtype.itemsize
        self._remote = RemoteObject(record.url, record)
        name = xxhash.xxh3_64_hexdigest(json.dumps(asdict(record)).encode())
        self.blocks = BlockCache(cache, name, record.size, self._remote.fetch)
        self._prefetcher = Prefetcher(self.blocks)
        self.n_bytes, self.size = record.size, record.size // self.itemsize

    @classmethod
    def of(cls, remote: Path, dtype: np.dtype) -> "RemoteTokens":
        """The token ids of the object that the file PREFIX.remote describes. Raises DataError where it is damaged."""
        try:
            record = ObjectRecord(**json.loads(remote.read_text())["bin"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise refuse(str(remote), f"is damaged ({reason_of(error)})", f"delete {remote.parent}") from error
        return cls(record, remote.parent.parent, dtype)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            chosen = range(self.size)[which]
            assert chosen.step == 1
            first, stop = chosen.start, max(chosen.start, chosen.stop)
            return np.frombuffer(self.blocks.read(first * self.itemsize, stop * self.itemsize), self.dtype)
        if isinstance(which, np.ndarray):
            return np.array([self[int(place)] for place in which.tolist()], self.dtype)
        place = int(which)
        return self[place : place + 1][0]

    def prefetch(self, start: int, stop: int) -> None:
        """Begins to fetch the tokens [start, stop); returns at once."""
        first, last = start * self.itemsize // BLOCK_BYTES, -(-stop * self.itemsize // BLOCK_BYTES)
        self._prefetcher.want(range(first, last))
