"""What a checkpoint directory says about itself. Without a valid manifest a directory is not a checkpoint."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from parallel.checkpoint.boxes import Box, coverage_error

FORMAT = 2
MANIFEST = "manifest.json"
HASH_CHUNK = 16 << 20


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


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Writes and syncs manifest.json, its own hash within, through a temporary file."""
    temporary = directory / f"{MANIFEST}.partial"
    with open(temporary, "wb") as out:
        out.write(seal({"format": FORMAT, **asdict(manifest)}))
        out.flush()
        os.fsync(out.fileno())
    temporary.rename(directory / MANIFEST)
    sync_directory(directory)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint; raises DamagedCheckpoint where it is missing, torn, changed, foreign or moved."""
    path = directory / MANIFEST
    try:
        content = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise DamagedCheckpoint(f"{path} is missing") from None
    if seal_of(content[:-SEAL_BYTES] + b"}") != content[-SEAL_BYTES:]:
        raise DamagedCheckpoint(f"{path} does not match its own hash")
    body = json.loads(content[:-SEAL_BYTES] + b"}")
    if body.pop("format", None) != FORMAT:
        raise DamagedCheckpoint(f"{path} is not of format {FORMAT}")
    named = re.fullmatch(r"step-(\d+)", directory.name)
    if named is not None and int(named[1]) != body["step"]:
        raise DamagedCheckpoint(f"{path} is of step {body['step']}, and its folder is named {directory.name}")
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


def check_files(manifest: Manifest, directory: Path, files: list[str]) -> list[str]:
    """What is wrong with these files' sizes and hashes, one line each naming the file."""
    problems = []
    for file in files:
        path, expected = directory / file, manifest.files[file]
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != expected["bytes"]:
            problems.append(f"{path} has {path.stat().st_size} bytes, the manifest says {expected['bytes']}")
        elif hash_file(path) != expected["xxh3_128"]:
            problems.append(f"{path} does not match its hash in the manifest")
    return problems


def hash_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """xxh3_128 of the file's bytes, in hexadecimal. ``on_bytes`` is told how many more bytes are done."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


def sync_directory(directory: Path) -> None:
    """Makes renames within the directory durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
