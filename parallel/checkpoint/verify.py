"""Checking a checkpoint afterwards, on one process: all that a load relies on, and the shards' own tables."""

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path

from parallel.checkpoint.manifest import DamagedCheckpoint, Manifest, Piece, certify, hash_file, read_manifest

FP32_BYTES = 4


def problems_of(directory: Path, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """What is wrong with the checkpoint, one line each, naming the file; empty where it is whole.

    The manifest's own hash, the coverage certificate, each file's size and hash, and each shard's own table of tensors
    against the manifest's pieces. ``on_bytes`` is told how many more bytes have been read.
    """
    try:
        manifest = read_manifest(directory)
    except DamagedCheckpoint as error:
        return [str(error)]
    problems = [f"{directory}: {line}" for line in certify(manifest)]
    for file in sorted(manifest.files):
        problems += problems_of_file(manifest, directory, file, on_bytes)
    return problems


def problems_of_file(
    manifest: Manifest, directory: Path, file: str, on_bytes: Callable[[int], None] | None = None
) -> list[str]:
    """What is wrong with one file, at most one line for what its bytes are and then one for each piece."""
    path, expected = directory / file, manifest.files[file]
    if not path.is_file():
        return [f"{path} is missing"]
    if path.stat().st_size != expected["bytes"]:
        return [f"{path} has {path.stat().st_size} bytes, the manifest says {expected['bytes']}"]
    if hash_file(path, on_bytes) != expected["xxh3_128"]:
        return [f"{path} does not match its hash in the manifest"]
    pieces = [piece for piece in manifest.pieces if piece.file == file]
    return problems_of_table(path, pieces) if pieces else []


def problems_of_table(path: Path, pieces: list[Piece]) -> list[str]:
    """Where a shard's own table differs from the pieces that the manifest places in it."""
    with open(path, "rb") as shard:
        (length,) = struct.unpack("<Q", shard.read(8))
        table = json.loads(shard.read(length))
    table.pop("__metadata__", None)
    problems = []
    for piece in pieces:
        entry = table.pop(piece.key, None)
        if entry is None:
            problems.append(f"{path} lacks {piece.kind} of {piece.name} at {list(piece.start)}")
        elif entry["dtype"] != "F32" or entry["shape"] != list(piece.shape):
            problems.append(
                f"{path} holds {piece.kind} of {piece.name} at {list(piece.start)} as {entry['dtype']} "
                f"{entry['shape']}, the manifest says F32 {list(piece.shape)}"
            )
    return problems + [f"{path} holds {key}, which the manifest does not name" for key in table]


def bytes_of(manifest: Manifest) -> int:
    """Of all files but the manifest."""
    return sum(expected["bytes"] for expected in manifest.files.values())


def tensor_bytes(manifest: Manifest, kind: str) -> int:
    """Of all logical tensors of one kind, fp32."""
    return FP32_BYTES * sum(prod(manifest.tensors[name]) for name in manifest.kinds[kind])
