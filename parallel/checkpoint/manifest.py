"""What a checkpoint directory says about itself. Without a valid manifest a directory is not a checkpoint."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from parallel.checkpoint.boxes import Box, coverage_error
from parallel.checkpoint.folder import MANIFEST, Folder, LocalFolder, open_folder, step_of, sync_directory

FORMAT = 2
HASH_CHUNK = 1 << 20

Location = Folder | Path | str  # of one checkpoint: opened already, a directory, or a URL


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete, changed or of another format; the message names the file."""


@dataclass(frozen=True)
class Piece:
    """One box of one logical tensor: where its elements lie on disk."""

    kind: str  # weight, exp_avg, exp_avg_sq, momentum_buffer
    name: str  # of the logical tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    key: str  # in the safetensors file

    @property
    def box(self) -> Box:
        """The elements held."""
        return Box(self.start, self.shape)


@dataclass
class Manifest:
    """The whole content: scalars, logical tensors, pieces, and each file's size and hash."""

    step: int
    scalars: dict[str, Any]  # data position, optimizer's step, loss scaler
    tensors: dict[str, list[int]]  # logical name -> shape
    kinds: dict[str, list[str]]  # kind -> the names that have it
    pieces: list[Piece] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # file -> bytes, xxh3_128


def certify(manifest: Manifest) -> list[str]:
    """The coverage certificate: every element of every logical tensor, in every kind, is written exactly once.

    Returns what is wrong, one line each; empty where the certificate holds.
    """
    boxes: dict[tuple[str, str], list[Box]] = {}
    for piece in manifest.pieces:
        boxes.setdefault((piece.kind, piece.name), []).append(piece.box)
    problems = []
    for kind, names in manifest.kinds.items():
        for name in names:
            problem = coverage_error(manifest.tensors[name], boxes.pop((kind, name), []))
            if problem is not None:
                problems.append(f"{kind} of {name}: {problem}")
    problems += [f"{kind} of {name}: not a tensor of this model" for kind, name in boxes]
    return problems


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of manifest.json, its own hash within."""
    return seal({"format": FORMAT, **vars(manifest), "pieces": [vars(piece) for piece in manifest.pieces]})


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Writes and syncs manifest.json into a directory of a file system, through a temporary file."""
    partial = f"{MANIFEST}.partial"
    with LocalFolder(directory).create(partial) as out:
        out.write(encode_manifest(manifest))
    (directory / partial).rename(directory / MANIFEST)
    sync_directory(directory)


def read_manifest(location: Location) -> Manifest:
    """The manifest of a checkpoint; raises DamagedCheckpoint where it is missing, torn, changed, foreign or moved."""
    folder = open_folder(location)
    path = folder.path(MANIFEST)
    try:
        content = folder.read_bytes(MANIFEST)
    except (FileNotFoundError, IsADirectoryError):
        raise DamagedCheckpoint(f"{path} is missing") from None
    if seal_of(content[:-SEAL_BYTES] + b"}") != content[-SEAL_BYTES:]:
        raise DamagedCheckpoint(f"{path} does not match its own hash")
    body = json.loads(content[:-SEAL_BYTES] + b"}")
    if body.pop("format", None) != FORMAT:
        raise DamagedCheckpoint(f"{path} is not of format {FORMAT}")
    named = step_of(folder.name)
    if named is not None and named != body["step"]:
        raise DamagedCheckpoint(f"{path} is of step {body['step']}, and its folder is named {folder.name}")
    pieces = [
        Piece(**{**piece, "start": tuple(piece["start"]), "shape": tuple(piece["shape"])})
        for piece in body.pop("pieces")
    ]
    return Manifest(pieces=pieces, **body)


def seal(body: dict[str, Any]) -> bytes:
    """The body as JSON, with the hash of exactly these bytes as its last entry: no change of any byte goes unseen."""
    content = json.dumps(body, separators=(",", ":")).encode()
    return content[:-1] + seal_of(content)


def seal_of(content: bytes) -> bytes:
    """What ends a manifest whose JSON without it is ``content``."""
    return b',"xxh3_128":"' + xxhash.xxh3_128(content).hexdigest().encode() + b'"}'


SEAL_BYTES = len(seal_of(b""))


def check_sizes(manifest: Manifest, location: Location, files: Iterable[str]) -> list[str]:
    """Which of these files are missing or of another size, one line each."""
    folder, problems = open_folder(location), []
    for file in files:
        size, expected = folder.size(file), manifest.files[file]["bytes"]
        if size is None:
            problems.append(f"{folder.path(file)} is missing")
        elif size != expected:
            problems.append(f"{folder.path(file)} has {size} bytes, the manifest says {expected}")
    return problems


def check_files(
    manifest: Manifest, location: Location, files: Iterable[str], on_bytes: Callable[[int], None] | None = None
) -> list[str]:
    """What is wrong with these files' sizes and hashes, one line each naming the file."""
    folder, problems = open_folder(location), []
    for file in files:
        wrong = check_sizes(manifest, folder, [file])
        if not wrong and hash_in(folder, file, on_bytes) != manifest.files[file]["xxh3_128"]:
            wrong = [hash_problem(folder, file)]
        problems += wrong
    return problems


def hash_problem(folder: Folder, file: str) -> str:
    """The line for a file whose bytes changed."""
    return f"{folder.path(file)} does not match its hash in the manifest"


def hash_file(path: Path) -> str:
    """xxh3_128 of a file's bytes, in hexadecimal."""
    return hash_in(LocalFolder(path.parent), path.name)


def hash_in(folder: Folder, file: str, on_bytes: Callable[[int], None] | None = None) -> str:
    """xxh3_128 of the bytes of a file in a folder, in hexadecimal. ``on_bytes`` is told how many more are done."""
    digest, view = xxhash.xxh3_128(), memoryview(bytearray(HASH_CHUNK))
    with folder.open(file) as content:
        while got := content.readinto(view):
            digest.update(view[:got])
            if on_bytes is not None:
                on_bytes(got)
    return digest.hexdigest()
