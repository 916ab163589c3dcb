"""Verifies a saved checkpoint on one process: all that a load relies on, and the headers of the shards."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from parallel.checkpoint.cuts import ShardIndex
from parallel.checkpoint.manifest import (
    ELEMENT_BYTES,
    MOST_PROBLEMS,
    DamagedCheckpoint,
    Location,
    Manifest,
    check_files,
    read_manifest,
)
from parallel.checkpoint.places import open_folder
from parallel.checkpoint.regular import UnfitFile
from parallel.checkpoint.safetensors_stream import NotSafetensors, read_header
from parallel.checkpoint.schema import Piece
from parallel.checkpoint.store import MANIFEST, Folder


@dataclass(frozen=True)
class Findings:
    """The result of checking all of a checkpoint's bytes."""

    manifest: Manifest | None  # None where it is damaged
    problems: list[str]  # one line each, naming the file; empty where the checkpoint is whole
    unlisted: list[str]  # files that the manifest does not name, and that no load reads


def examine(location: Location, on_bytes: Callable[[int], None] | None = None) -> Findings:
    """Checks all that a load relies on: the manifest, its certificate, each file's size and hash, each shard's header.

    Files that are not in the manifest are listed, but are no problem, since nothing reads them. ``on_bytes`` is called
    with the number of bytes read since its last call. One process calls it.
    """
    folder = open_folder(location)
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpoint as error:
        return Findings(None, [str(error)], [])
    pieces: dict[str, list[Piece]] = {}
    for piece in manifest.pieces:
        pieces.setdefault(piece.file, []).append(piece)
    problems, index = [], ShardIndex(manifest.cuts)
    numbers = {file: number for number, file in enumerate(manifest.shards)}
    for file in sorted(manifest.files):
        found = check_files(manifest, folder, [file], on_bytes)
        owned = index.owned(numbers[file]) if file in numbers and not found else []
        expected = pieces.get(file, []) + [piece for each in owned for piece in each.pieces(file)]
        problems += found or problems_of_table(folder, file, manifest.files[file]["bytes"], expected)
    unlisted = [file for file in folder.files() if file not in manifest.files and file != MANIFEST]
    return Findings(manifest, problems, unlisted)


def problems_of(location: Location) -> list[str]:
    """One message for each problem of the checkpoint, naming the file; empty where it is whole."""
    return examine(location).problems


def problems_of_table(folder: Folder, file: str, file_bytes: int, pieces: list[Piece]) -> list[str]:
    """Messages on how a shard's header differs from the pieces that the manifest places in it: at most MOST_PROBLEMS.

    A file without pieces is no shard, and gives none.
    """
    if not pieces:
        return []
    path = folder.path(file)
    try:
        with folder.open(file) as shard:
            table = dict(read_header(shard, file_bytes).shapes)
    except FileNotFoundError:
        return [f"{path} is missing"]
    except (NotSafetensors, UnfitFile) as error:
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
    problems += [f"{path} holds {key}, which the manifest does not name" for key in table]
    return problems[:MOST_PROBLEMS]


def bytes_of(manifest: Manifest) -> int:
    """The total size in bytes of all the checkpoint's files but the manifest."""
    return sum(expected["bytes"] for expected in manifest.files.values())


def tensor_bytes(manifest: Manifest, kind: str) -> int:
    """The total size in bytes, in fp32, of all logical tensors of one kind."""
    return ELEMENT_BYTES * sum(prod(manifest.tensors[name]) for name in manifest.kinds[kind])
