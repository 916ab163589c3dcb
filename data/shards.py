"""Cutting a corpus into shards: fixed slices of the input, so that the number of workers changes no byte of the output.

A shard is a list of slices. A slice is a range of bytes of a text or jsonl file (it owns the lines that begin in it),
a row group of a parquet file, a whole compressed, Arrow or WARC file, one of a Hugging Face dataset's own shards, or
the texts of a shard that cleaning kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, assert_never

from data.config import SourceConfig
from data.errors import reason_of, refuse
from data.hub import count_hub_shards
from data.sources import InputFile, Kind, reads_files

MOST_BYTES = 1 << 40  # the largest size that a row group's metadata may state
COMPRESSION = 4  # text in a compressed file, as a multiple of its size: for progress and the estimate of disk only


@dataclass(frozen=True)
class Slice:
    """One piece of the input."""

    path: str
    kind: Kind | Literal["hub", "cleaned"]
    start: int  # byte, row group or the dataset's shard
    stop: int
    n_bytes: int  # bytes of text, as far as they are known without reading it
    whole: bool = True  # whether it is the only slice of its file
    file_bytes: int = 0  # size of the whole file on disk


Shard = tuple[Slice, ...]


@dataclass(frozen=True)
class Plan:
    """The plan for preparing one raw source: its files, and the shards into which they are cut."""

    source: SourceConfig
    number: int  # its place in data.sources
    files: list[InputFile]
    shards: list[Shard]

    @property
    def key(self) -> str:
        """The source's name in errors, such as data.sources[2]."""
        return f"data.sources[{self.number}]"


def plan_shards(source: SourceConfig, files: list[InputFile], shard_bytes: int, key: str) -> list[Shard]:
    """The source's shards, in order: each takes slices until it holds ``shard_bytes``.

    It reads only parquet footers and a Hugging Face dataset's file list. ``key`` names the source in errors.
    """
    if not reads_files(source):
        return [(Slice(source.path, "hub", i, i + 1, 0),) for i in range(count_hub_shards(source, key))]
    shards: list[Shard] = []
    current: list[Slice] = []
    room = shard_bytes
    for file in files:
        for piece in _cut_file(file, room, shard_bytes):
            current.append(piece)
            room -= piece.n_bytes
            if room <= 0:
                shards.append(tuple(current))
                current, room = [], shard_bytes
    return [*shards, tuple(current)] if current else shards


def _cut_file(file: InputFile, room: int, shard_bytes: int) -> Iterator[Slice]:
    """The file's slices. The first fills the ``room`` left in the current shard, the following ones a whole shard."""
    match file.kind:
        case "jsonl":
            yield from _cut_bytes(file, room, shard_bytes)
        case "text":  # one document: cut only where it would not fit a shard
            yield from _cut_bytes(file, max(file.n_bytes, 1) if file.n_bytes <= shard_bytes else room, shard_bytes)
        case "jsonl.gz" | "jsonl.zst":
            yield Slice(file.path, file.kind, 0, file.n_bytes, file.n_bytes * COMPRESSION)
        case "parquet":
            for group, n_bytes in enumerate(_row_group_bytes(file.path)):
                yield Slice(file.path, file.kind, group, group + 1, n_bytes, whole=False, file_bytes=file.n_bytes)
        case "warc":
            n_bytes = file.n_bytes * (COMPRESSION if file.path.lower().endswith(".gz") else 1)
            yield Slice(file.path, file.kind, 0, file.n_bytes, n_bytes, file_bytes=file.n_bytes)
        case "arrow":
            yield Slice(file.path, file.kind, 0, file.n_bytes, file.n_bytes, file_bytes=file.n_bytes)
        case _:
            assert_never(file.kind)


def _cut_bytes(file: InputFile, first: int, rest: int) -> Iterator[Slice]:
    start, stop = 0, min(first, file.n_bytes)
    while start < file.n_bytes:
        yield Slice(file.path, file.kind, start, stop, stop - start, whole=stop - start == file.n_bytes)
        start, stop = stop, min(stop + rest, file.n_bytes)


def _row_group_bytes(path: str) -> list[int]:
    import pyarrow
    import pyarrow.parquet

    remedy = "leave it out with exclude, or mend it"
    try:
        metadata = pyarrow.parquet.read_metadata(path)
        sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    except (pyarrow.ArrowException, OSError, MemoryError, OverflowError) as error:
        raise refuse(path, f"is not a parquet file ({reason_of(error)})", remedy) from error
    if any(not 0 <= n_bytes < MOST_BYTES for n_bytes in sizes):
        raise refuse(path, f"claims to hold {max(sizes, key=abs)} bytes in one row group", remedy)
    return sizes
