"""The preflight's check of the shared disk: each node writes a file there, and reads one that another node wrote."""

import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

BLOCK_BYTES = 4 * 2**20
ALL_BYTES = 16 * 2**30  # of all nodes together: they write at the same time, and a slow disk manages 1 GB/s


def file_bytes(n_nodes: int, most: int) -> int:
    """The size in bytes of each node's file, a whole number of blocks and at least one; ``most`` limits it."""
    return max(1, min(most, ALL_BYTES // n_nodes) // BLOCK_BYTES) * BLOCK_BYTES


def write_file(folder: Path, node: str, token: str, n_bytes: int) -> float:
    """Seconds to write and fsync this node's file. ``token`` differs in each preflight, so that no old file passes."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = list(_blocks(node, token, n_bytes))
    started = time.perf_counter()
    with (folder / f"{node}.writing").open("wb") as file:
        for block in blocks:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    (folder / f"{node}.writing").rename(folder / node)
    return seconds


def read_file(folder: Path, node: str, token: str, n_bytes: int) -> float:
    """Seconds to read the file of ``node``. Raises OSError where its contents are not what that node wrote."""
    started = time.perf_counter()
    with (folder / node).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # this node may have it in memory
        found = [file.read(BLOCK_BYTES) for _ in range(0, n_bytes, BLOCK_BYTES)]
    seconds = time.perf_counter() - started
    wrong = sum(got != written for got, written in zip(found, _blocks(node, token, n_bytes), strict=True))
    if wrong:
        raise OSError(f"{wrong} of {len(found)} blocks of the file that {node} wrote are not what it wrote")
    return seconds


def missing_files(folder: Path, nodes: Sequence[str], seconds: float) -> list[str]:
    """Those of ``nodes`` whose files, already written, do not become visible here within ``seconds``.

    Each file is looked up by its name, since NFS asks the server for that, but answers a listing from its cache.
    """
    deadline = time.monotonic() + seconds
    while True:
        missing = [node for node in nodes if not (folder / node).exists()]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.2)


def _blocks(node: str, token: str, n_bytes: int) -> Iterator[bytes]:
    """The blocks of a node's file, no two of them equal, so that no file system can store one for all."""
    block = random.Random(f"{token}/{node}").randbytes(BLOCK_BYTES)
    for number in range(0, n_bytes, BLOCK_BYTES):
        yield number.to_bytes(8, "little") + block[8:]


def remove_file(folder: Path, node: str) -> None:
    """Removes this node's file, and the folder too if it was the last one there."""
    with contextlib.suppress(OSError):  # other nodes' files are still there, or rank 0 has removed the folder
        (folder / node).unlink()
        folder.rmdir()
