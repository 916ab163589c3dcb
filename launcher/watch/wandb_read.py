"""Reads the file that a W&B run leaves on disk (``run-ID.wandb``), with no network and no wandb service.

The file is W&B's transaction log: 7 header bytes (":W&B", uint16 magic 0xBEE1, uint8 version), then blocks of 32 KiB
in LevelDB's log format (https://github.com/google/leveldb/blob/main/doc/log_format.md): chunks of crc32 (uint32),
length (uint16), type (uint8: 1 whole, 2 first, 3 middle, 4 last) and data, with zeros where fewer than 7 bytes are left
in a block. W&B's crc32 is zlib's, over type and data. A record is a ``wandb_internal_pb2.Record``.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from launcher.watch.wandb_import import Record  # pyright: ignore[reportAttributeAccessIssue] -- made at run time

HEADER = struct.Struct("<4sHB")
CHUNK = struct.Struct("<IHB")
BLOCK_BYTES = 32 * 1024
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def wandb_files(run_dir: Path) -> list[Path]:
    """The W&B files under a run directory, oldest first: one for each time the run was started or resumed."""
    return sorted((run_dir / "wandb").glob("*run-*/run-*.wandb"), key=lambda path: path.parent.name.split("run-")[1])


def read_history(path: Path) -> list[dict[str, Any]]:
    """The logged rows of one file, in order, without W&B's own keys (those that begin with an underscore).

    NaN and infinities, which W&B writes as text, come back as floats. A record cut off by a kill ends the list. Raises
    ValueError where the file is not a W&B file or a chunk is damaged.
    """
    return [_row(record) for record in read_records(path) if record.WhichOneof("record_type") == "history"]


def is_whole(path: Path) -> bool:
    """Whether the file of a finished run is complete: its last record is the run's exit. Reads at most 64 KiB.

    W&B's service writes nothing more after a record that could not be written, so a file without the exit record lacks
    rows. Raises ValueError where the file is not a W&B file or a chunk that was read is damaged.
    """
    with path.open("rb") as file:
        at = max(0, (file.seek(0, os.SEEK_END) - 1) // BLOCK_BYTES - 1) * BLOCK_BYTES
        file.seek(at)
        data = file.read()
    chunks = _chunks(data, path, 0) if at else _first_chunks(data, path)
    *_, last = [Record(), *map(_record, _records(chunks))]
    return last.WhichOneof("record_type") == "exit"


def read_records(path: Path) -> Iterator[Record]:
    """Every record of one file, in order. Raises ValueError where it is not a W&B file or a chunk is damaged."""
    return map(_record, _records(_first_chunks(path.read_bytes(), path)))


def _record(data: bytes) -> Record:
    record = Record()
    record.ParseFromString(data)
    return record


def _row(record: Record) -> dict[str, Any]:
    row = {}
    for item in record.history.item:
        key = item.key or ".".join(item.nested_key)
        if not key.startswith("_"):
            row[key] = _number(json.loads(item.value_json))
    return row


def _number(value: Any) -> Any:
    if isinstance(value, list):
        return [_number(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _records(chunks: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """The bytes of each record, joined from its chunks; a record whose first chunk is missing is left out."""
    parts: list[bytes] = []
    for kind, part in chunks:
        if kind in (WHOLE, FIRST):
            parts = []
        elif not parts:
            continue
        parts.append(part)
        if kind in (WHOLE, LAST):
            yield b"".join(parts)
            parts = []


def _first_chunks(data: bytes, path: Path) -> Iterator[tuple[int, bytes]]:
    """The chunks after the file's header. Raises ValueError where the header is not W&B's."""
    if len(data) < HEADER.size or HEADER.unpack_from(data)[:2] != (b":W&B", 0xBEE1):
        raise ValueError(f"{path} is not a W&B file: it does not begin with the header ':W&B'")
    return _chunks(data, path, HEADER.size)


def _chunks(data: bytes, path: Path, at: int) -> Iterator[tuple[int, bytes]]:
    """Type and data of each chunk from offset ``at`` on, up to the first chunk that the file's end cuts off.

    Raises ValueError for a chunk whose checksum does not match.
    """
    while True:
        left_in_block = BLOCK_BYTES - at % BLOCK_BYTES
        if left_in_block < CHUNK.size:
            at += left_in_block
        if at + CHUNK.size > len(data):
            return
        crc, length, kind = CHUNK.unpack_from(data, at)
        part = data[at + CHUNK.size : at + CHUNK.size + length]
        if len(part) < length or (crc, length, kind) == (0, 0, 0):  # torn, or space that was never written
            return
        if zlib.crc32(part, zlib.crc32(bytes([kind]))) != crc:
            raise ValueError(f"{path} is damaged at byte {at}: a chunk does not match its checksum")
        yield kind, part
        at += CHUNK.size + length
