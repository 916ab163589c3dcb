"""Checking a checkpoint afterwards, on one process: all that a load relies on, and the shards' own tables."""

from collections.abc import Callable
from math import prod

from parallel.checkpoint.folder import Folder, open_folder
from parallel.checkpoint.manifest import (
    DamagedCheckpoint,
    Location,
    Manifest,
    Piece,
    certify,
    check_files,
    read_manifest,
)
from parallel.checkpoint.safetensors_stream import NotSafetensors, read_header

FP32_BYTES = 4


def problems_of(location: Location, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """What is wrong with the checkpoint, one line each, naming the file; empty where it is whole.

    The manifest's own hash, the coverage certificate, each file's size and hash, and each shard's own table of tensors
    against the manifest's pieces. ``on_bytes`` is told how many more bytes have been read.
    """
    folder = open_folder(location)
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpoint as error:
        return [str(error)]
    problems = [f"{folder}: {line}" for line in certify(manifest)]
    for file in sorted(manifest.files):
        problems += problems_of_file(manifest, folder, file, on_bytes)
    return problems


def problems_of_file(
    manifest: Manifest, folder: Folder, file: str, on_bytes: Callable[[int], None] | None = None
) -> list[str]:
    """What is wrong with one file, at most one line for what its bytes are and then one for each piece."""
    problems = check_files(manifest, folder, [file], on_bytes)
    pieces = [piece for piece in manifest.pieces if piece.file == file]
    return problems_of_table(folder, file, pieces) if pieces and not problems else problems


def problems_of_table(folder: Folder, file: str, pieces: list[Piece]) -> list[str]:
    """Where a shard's own table differs from the pieces that the manifest places in it."""
    path = folder.path(file)
    try:
        with folder.open(file) as shard:
            table = dict(read_header(shard).shapes)
    except NotSafetensors as error:
        return [f"{path} {error}"]
    problems = []
    for piece in pieces:
        shape = table.pop(piece.key, None)
        if shape is None:
            problems.append(f"{path} lacks {piece.kind} of {piece.name} at {list(piece.start)}")
        elif shape != piece.shape:
            problems.append(
                f"{path} holds {piece.kind} of {piece.name} at {list(piece.start)} as {list(shape)}, "
                f"the manifest says {list(piece.shape)}"
            )
    return problems + [f"{path} holds {key}, which the manifest does not name" for key in table]


def bytes_of(manifest: Manifest) -> int:
    """Of all files but the manifest."""
    return sum(expected["bytes"] for expected in manifest.files.values())


def tensor_bytes(manifest: Manifest, kind: str) -> int:
    """Of all logical tensors of one kind, fp32."""
    return FP32_BYTES * sum(prod(manifest.tensors[name]) for name in manifest.kinds[kind])
