"""Reads any box of any logical tensor from a checkpoint, whatever layout wrote it. load.py fills an engine by it."""

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from parallel.checkpoint.boxes import Box, whole
from parallel.checkpoint.cuts import pieces_within
from parallel.checkpoint.manifest import (
    DamagedCheckpoint,
    Location,
    Manifest,
    check_files,
    hash_problem,
    read_manifest,
)
from parallel.checkpoint.places import open_folder
from parallel.checkpoint.regular import UnfitFile
from parallel.checkpoint.safetensors_stream import NotSafetensors
from parallel.checkpoint.scatter import ShardReader, Target
from parallel.checkpoint.schema import Cut, Piece
from parallel.checkpoint.store import MANIFEST, Folder

LARGEST_SMALL_BYTES = 256 << 20  # of a file of the tokenizer, or the run's config

Targets = Mapping[tuple[str, str], Sequence[Target]]  # (kind, name) -> the boxes to be read of it
Wanted = dict[str, list[tuple[Piece, Target]]]  # file -> its pieces that hold elements of a target, with the target


class Checkpoint:
    """A checkpoint opened for reading: logical tensors by name, whole or in boxes.

    ``is_verified`` says whether the files' hashes have been checked; if not, ``verify`` checks them, or ``load_state``
    as it reads. Later reads are of the same files: one that has been replaced since is refused.
    """

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.is_verified = False
        self.stamps: dict[str, Any] = {}  # by file, of those that must not change from now on
        self.pieces: dict[tuple[str, str], list[Piece]] = {}
        for piece in manifest.pieces:
            self.pieces.setdefault((piece.kind, piece.name), []).append(piece)
        self.cuts: dict[tuple[str, str], list[Cut]] = {}
        for cut in manifest.cuts:
            for kind in cut.kinds:
                self.cuts.setdefault((kind, cut.name), []).append(cut)
        self.copies: dict[str, Path] = {}

    @property
    def step(self) -> int:
        """The number of the update after which the checkpoint was saved."""
        return self.manifest.step

    @property
    def tokenizer(self) -> Path | None:
        """A copy of the tokenizer's folder, which lasts as long as this object; None where none was saved."""
        return self.attached("tokenizer")

    def attached(self, name: str) -> Path | None:
        """A copy of a small file, or of a folder of them, that was saved with the tensors; None where there is none.

        The copy lasts as long as this object. It has the very bytes whose hashes were compared, and no file that the
        manifest does not list. Raises DamagedCheckpoint.
        """
        found = [(file, below) for file in self.manifest.files if (below := _below(file, name)) is not None]
        if not found:
            return None
        if len({below for _, below in found}) != len(found):
            raise DamagedCheckpoint(f"{self.folder.path(MANIFEST)} lists more than one {name}")
        if name not in self.copies:
            copy = Path(tempfile.mkdtemp())
            weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
            for file, below in found:
                path = copy / name / below
                path.parent.mkdir(parents=True, exist_ok=True)
                content = read_small(self.folder, self.manifest, file)
                try:
                    path.write_bytes(content)
                except OSError as error:
                    error.filename = str(path)  # the error of a write to a full disk has no file name
                    raise
            self.copies[name] = copy / name
        return self.copies[name]

    def verify(self) -> None:
        """Compares every file with its hash; raises DamagedCheckpoint naming those that differ. For one process."""
        self.hold(self.manifest.files)
        problems = check_files(self.manifest, self.folder, self.manifest.files)
        if problems:
            raise DamagedCheckpoint("; ".join(problems))
        self.is_verified = True

    def hold(self, files: Iterable[str]) -> None:
        """Makes later reads refuse these files if they are written to or replaced from now on.

        Raises DamagedCheckpoint where one is missing or no file.
        """
        self.stamps |= {file: _stamp(self.folder, file) for file in files}

    def names(self, kind: str = "weight") -> list[str]:
        """The names of the logical tensors that were saved in this kind (a weight, or a state of the optimizer)."""
        return self.manifest.kinds.get(kind, [])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole logical tensor."""
        return tuple(self.manifest.tensors[name])

    def read(self, name: str, kind: str = "weight") -> Tensor:
        """One whole logical tensor, fp32 on the CPU."""
        return self.read_box(name, whole(self.shape(name)), kind)

    def read_box(self, name: str, box: Box, kind: str = "weight") -> Tensor:
        """The elements of ``box``, fp32 on the CPU, read from all pieces that hold some. Raises DamagedCheckpoint."""
        result = torch.empty(box.shape, dtype=torch.float32)
        problems = self.fill(self.wanted({(kind, name): [Target(box, result)]}))
        if problems:
            raise DamagedCheckpoint("; ".join(problems))
        return result

    def wanted(self, targets: Targets) -> Wanted:
        """The pieces that hold elements of the targets, by file."""
        wanted: Wanted = {}
        for key, boxes in targets.items():
            for target in boxes:
                for piece in self.pieces_within(key, target.box):
                    wanted.setdefault(piece.file, []).append((piece, target))
        return wanted

    def has(self, kind: str, name: str) -> bool:
        """Whether the logical tensor was saved in this kind."""
        return (kind, name) in self.pieces or (kind, name) in self.cuts

    def pieces_within(self, key: tuple[str, str], box: Box) -> Iterator[Piece]:
        """The pieces of (kind, name) that hold elements of the box."""
        assert self.has(*key), key
        yield from (piece for piece in self.pieces.get(key, ()) if piece.box.intersect(box) is not None)
        for cut in self.cuts.get(key, ()):
            yield from pieces_within(cut, key[0], self.manifest.shards, box)

    def fill(self, wanted: Wanted, hashed: Iterable[str] = ()) -> list[str]:
        """Reads the elements into the targets; returns a message for each file with a problem.

        The files of ``hashed`` are read whole and compared with their hashes.
        """
        hashed, problems = set(hashed), []
        device = next((target.values.device for pairs in wanted.values() for _, target in pairs), torch.device("cpu"))
        reader = ShardReader(self.folder, device)
        for file in sorted(hashed | wanted.keys()):
            try:
                digest = reader.read(file, wanted.get(file, []), hashes=file in hashed)
                stamp = self.folder.stamp(file)
            except FileNotFoundError:
                problems.append(f"{self.folder.path(file)} is missing")
            except (NotSafetensors, UnfitFile) as error:
                problems.append(f"{self.folder.path(file)} {error}")
            else:
                if digest is not None and digest != self.manifest.files[file]["xxh3_128"]:
                    problems.append(hash_problem(self.folder, file))
                elif stamp != self.stamps.get(file, stamp):
                    problems.append(f"{self.folder.path(file)} was replaced while the checkpoint was read")
        return problems


def _below(file: str, name: str) -> str | None:
    """The part of the file's path after ``name``: "" where the path ends with it, None where it is no part of it."""
    parts = file.split("/")
    return "/".join(parts[parts.index(name) + 1 :]) if name in parts else None


def _stamp(folder: Folder, file: str) -> Any:
    try:
        return folder.stamp(file)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{folder.path(file)} is missing") from None
    except UnfitFile as error:
        raise DamagedCheckpoint(f"{folder.path(file)} {error}") from None


def read_small(folder: Folder, manifest: Manifest, file: str) -> bytes:
    """The bytes of a small file that the manifest lists, checked against its hash. Raises DamagedCheckpoint."""
    expected, path = manifest.files[file], folder.path(file)
    if expected["bytes"] > LARGEST_SMALL_BYTES:
        raise DamagedCheckpoint(f"{path} has {expected['bytes']} bytes; {LARGEST_SMALL_BYTES} are the most")
    try:
        content = folder.read_bytes(file, expected["bytes"])
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except UnfitFile as error:
        raise DamagedCheckpoint(f"{path} {error}") from None
    if xxhash.xxh3_128_hexdigest(content) != expected["xxh3_128"]:
        raise DamagedCheckpoint(hash_problem(folder, file))
    return content


def open_checkpoint(location: Location, *, verify: bool = True) -> Checkpoint:
    """The checkpoint in a directory or at a URL, opened for reading by one process.

    Raises DamagedCheckpoint where its manifest is not valid, or, with ``verify``, where a file does not match its hash.
    """
    folder = open_folder(location)
    checkpoint = Checkpoint(folder, read_manifest(folder))
    if verify:
        checkpoint.verify()
    return checkpoint
