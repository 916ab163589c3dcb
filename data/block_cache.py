"""A folder of bounded size with blocks of remote files, shared by all processes of a machine.

    CACHE/bound.json                  {"bytes": n}: what the blocks may take, by the last config that opened it
    CACHE/blocks/OBJECT/00000012      a block's bytes and their xxh3 (8 bytes); written whole or not at all
    CACHE/locks/                      one process fetches a block while others wait; one makes room at a time

A block is read through its own open file, so that one which is evicted meanwhile is still read to its end. The least
recently used blocks are evicted before a new block is written, so the bound is never exceeded.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from data.errors import reason_of, refuse
from data.partial import partial_suffix, written_whole

BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 8
STRIPES = 64  # blocks with equal numbers modulo this share a lock
KEPT_SHARE = 0.9  # eviction frees space down to this share of the bound, so that not every block lists the folder
ATTEMPTS = 100  # to read a block that is evicted again and again before it can be opened


class BlockCache:
    """Blocks of one remote file. ``fetch(start, stop)`` gives its bytes [start, stop)."""

    def __init__(self, root: Path, name: str, n_bytes: int, fetch: Callable[[int, int], bytes]) -> None:
        self.root, self.n_bytes, self._fetch = root, n_bytes, fetch
        self.folder, self._locks = root / "blocks" / name, root / "locks"
        self._sound: set[int] = set()  # blocks whose bytes this process has compared with their hash
        with _telling(root):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._locks.mkdir(parents=True, exist_ok=True)
        self.bound = read_bound(root)

    def read(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop) of the file, fetching blocks that are missing.

        Raises what ``fetch`` raises, and DataError where the disk has no room.
        """
        parts = []
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            first = block * BLOCK_BYTES
            parts.append(self._read_block(block, max(0, start - first), min(stop - first, BLOCK_BYTES)))
        return b"".join(parts)

    def holds(self, block: int) -> bool:
        """Whether a block is in the cache."""
        return self._path(block).exists()

    def fetch(self, block: int) -> None:
        """Fetches a block that is not in the cache; waits where another thread or process is fetching it."""
        with locked(self._locks / f"block-{block % STRIPES}-{self.folder.name}"):
            if self.holds(block):
                return
            first = block * BLOCK_BYTES
            content = self._fetch(first, min(first + BLOCK_BYTES, self.n_bytes))
            self._store(block, content)

    def _read_block(self, block: int, begin: int, end: int) -> bytes:
        for _ in range(ATTEMPTS):
            try:
                with self._path(block).open("rb") as file:
                    with contextlib.suppress(FileNotFoundError):
                        os.utime(self._path(block))  # used now; a clock set back only makes eviction choose worse
                    if block in self._sound:
                        file.seek(begin)
                        return file.read(end - begin)
                    content = file.read()
            except FileNotFoundError:
                self.fetch(block)
                continue
            data, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
            if xxhash.xxh3_64_digest(data) == digest and len(data) >= end:
                self._sound.add(block)
                return data[begin:end]
            self._path(block).unlink(missing_ok=True)  # torn by a machine that went down
        found = f"data.cache_gib={self.bound / 2**30:.4g}: block {block} of {self.folder}"
        raise refuse(found, "was evicted each time before it could be read", "raise it")

    def _store(self, block: int, content: bytes) -> None:
        path = self._path(block)
        partial = path.with_name(f"{path.name}.{partial_suffix()}-{block}")
        self._sound.discard(block)
        with _telling(self.root), locked(self._locks / "room"):
            make_room(self.root, self.bound, len(content) + DIGEST_BYTES)
            try:
                partial.write_bytes(content + xxhash.xxh3_64_digest(content))
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)

    def _path(self, block: int) -> Path:
        return self.folder / f"{block:08}"


def make_room(root: Path, bound: int, n_bytes: int) -> None:
    """Evicts blocks until ``n_bytes`` more fit within the bound, and counts these. The caller holds the lock "room"."""
    counter = root / "blocks" / "bytes"
    try:
        used = int(counter.read_text())
    except (FileNotFoundError, ValueError):
        used = bound + 1  # not known: look
    if used + n_bytes > bound:
        blocks = sorted(_blocks(root))
        used = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if used + n_bytes <= bound * KEPT_SHARE:
                break
            path.unlink(missing_ok=True)
            used -= size
    counter.write_text(str(used + n_bytes))


def _blocks(root: Path) -> Iterator[tuple[int, int, Path]]:
    """(time of last use in ns, bytes, path) of each block."""
    for path in (root / "blocks").glob("*/*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            yield status.st_mtime_ns, status.st_size, path


def write_bound(root: Path, n_bytes: int) -> None:
    """Records the bytes that a cache's blocks may take. Raises DataError where its folder cannot be written to."""
    path = root / "bound.json"
    with _telling(root):
        root.mkdir(parents=True, exist_ok=True)
        if read_bound(root) != n_bytes:
            with written_whole(path) as file:
                file.write(json.dumps({"bytes": n_bytes}).encode())


def read_bound(root: Path) -> int:
    """The bytes that the blocks may take; 0 where nothing is recorded."""
    try:
        return int(json.loads((root / "bound.json").read_text())["bytes"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """A context in which no other thread or process holds the same lock. A process that dies releases its locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _telling(root: Path) -> Iterator[None]:
    """A context that turns an OSError of the cache's disk into a DataError that names the folder."""
    try:
        yield
    except OSError as error:
        rule = f"cannot be written to ({reason_of(error)})"
        raise refuse(f"data.cache_dir={str(root)!r}", rule, "free some room, or set it to another folder") from error
