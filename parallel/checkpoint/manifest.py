"""What a checkpoint directory says about itself. Without a valid manifest a directory is not a checkpoint."""

import json
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import xxhash

from parallel.checkpoint.boxes import Box, coverage_error
from parallel.checkpoint.cuts import elements_by_shard, every_piece_of, fault_of
from parallel.checkpoint.local import LocalFolder, sync_directory
from parallel.checkpoint.places import open_folder
from parallel.checkpoint.regular import UnfitFile
from parallel.checkpoint.schema import FORMAT, LARGEST_MANIFEST_BYTES, Cut, Malformed, Piece, parse_body
from parallel.checkpoint.store import MANIFEST, Folder, step_of

ELEMENT_BYTES = 4  # every tensor is fp32
WEIGHT = "weight"  # the kind of a parameter's values
BUFFER = "buffer"  # the kind of what is not a parameter: router biases
HASH_CHUNK = 1 << 20
MOST_RANGES = 1 << 25  # of all cuts: ZeRO 3 on 16,384 ranks has 16 million of DeepSeek-V3's 671B
MOST_PROBLEMS = 20  # lines that a certificate's failure is told in

Location = Folder | Path | str  # of one checkpoint: opened already, a directory, or a URL


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete, changed or of another format; the message names the file."""


@dataclass
class Manifest:
    """The whole content: scalars, logical tensors, where their elements lie, and each file's size and hash."""

    step: int
    scalars: dict[str, Any]  # data position, optimizer's step, loss scaler
    tensors: dict[str, list[int]]  # logical name -> shape
    kinds: dict[str, list[str]]  # kind -> the names that have it
    pieces: list[Piece] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # file -> bytes, xxh3_128
    shards: list[str] = field(default_factory=list)  # the files that the cuts name by number
    cuts: list[Cut] = field(default_factory=list)

    def every_piece(self) -> Iterator[Piece]:
        """All boxes in all files, those of the cuts one by one: at true sizes, millions."""
        yield from self.pieces
        for cut in self.cuts:
            yield from every_piece_of(cut, self.shards)


def certify(manifest: Manifest) -> list[str]:
    """What is wrong with what saving, loading and verifying all rely on, at most MOST_PROBLEMS lines; empty: it holds.

    Every element of every logical tensor, in every kind, is written exactly once; and every piece lies in a file that
    is listed with its hash, which is large enough for its pieces, under a key that no other piece has.
    """
    return list(islice(_faults(manifest), MOST_PROBLEMS))


def _faults(manifest: Manifest) -> Iterator[str]:
    boxes: dict[tuple[str, str], list[Box]] = {}
    for piece in manifest.pieces:
        boxes.setdefault((piece.kind, piece.name), []).append(piece.box)
    for cut in manifest.cuts:
        for kind in cut.kinds:
            boxes.setdefault((kind, cut.name), []).append(cut.box)
    known: dict[tuple[str, tuple[Box, ...]], str | None] = {}  # moments are mostly cut as their weight
    for kind, names in manifest.kinds.items():
        for name in names:
            if name not in manifest.tensors:
                yield f"{kind} of {name}: not a tensor of this model"
                continue
            those = name, tuple(boxes.pop((kind, name), []))
            if those not in known:
                known[those] = coverage_error(manifest.tensors[name], those[1])
            if known[those] is not None:
                yield f"{kind} of {name}: {known[those]}"
    yield from (f"{kind} of {name}: not a tensor of this model" for kind, name in boxes)
    values = Counter(name for kind in (WEIGHT, BUFFER) for name in manifest.kinds.get(kind, ()))
    yield from (f"{name}: not one of {WEIGHT} and {BUFFER}" for name in manifest.tensors if values[name] != 1)
    yield from _file_faults(manifest)


def _cut_faults(manifest: Manifest) -> Iterator[str]:
    """What is wrong with the cuts besides their boxes."""
    for cut in manifest.cuts:
        fault = fault_of(cut, len(manifest.shards))
        if fault is not None:
            yield f"{cut.kinds[0]} of {cut.name}: {fault}"
    n_ranges = sum(count for cut in manifest.cuts for count, *_ in cut.runs)
    if n_ranges > MOST_RANGES:
        yield f"the cuts have {n_ranges} ranges, more than {MOST_RANGES}"
    times = Counter(manifest.shards)
    yield from (f"{shard} is among the shards {count} times" for shard, count in times.items() if count > 1)
    with_pieces = dict.fromkeys(piece.file for piece in manifest.pieces)
    yield from (f"{file} holds pieces, and is among the shards of the cuts" for file in with_pieces if file in times)


def _file_faults(manifest: Manifest) -> Iterator[str]:
    faults = list(_cut_faults(manifest))
    yield from faults
    if faults:
        return  # else what follows would look for ranges in shards that there are not
    elements = elements_by_shard(manifest.cuts, len(manifest.shards))
    needed = Counter(dict(zip(manifest.shards, (ELEMENT_BYTES * each for each in elements), strict=True)))
    keys: set[tuple[str, str]] = set()
    for piece in manifest.pieces:
        if (piece.file, piece.key) in keys:
            yield f"{piece.kind} of {piece.name}: {piece.key} of {piece.file} is another piece's as well"
        keys.add((piece.file, piece.key))
        needed[piece.file] += ELEMENT_BYTES * prod(piece.shape)
    for file, n_bytes in needed.items():
        if file not in manifest.files:
            yield f"{file} holds pieces, and is not listed with its hash"
        elif manifest.files[file]["bytes"] < n_bytes:
            yield f"{file} is listed with {manifest.files[file]['bytes']} bytes, and its pieces have {n_bytes}"
    spelled = Counter(unicodedata.normalize("NFKC", file).casefold() for file in manifest.files)
    for file in manifest.files:
        folder = next((above for above in _folders(file) if above in manifest.files), None)
        if folder is not None:
            yield f"{file} is listed below {folder}, which is listed as a file"
        if spelled[unicodedata.normalize("NFKC", file).casefold()] > 1:
            yield f"{file} is listed twice, in spellings that a file system may take for one"


def _folders(file: str) -> Iterator[str]:
    while "/" in file:
        file = file.rpartition("/")[0]
        yield file


def differences(manifest: Manifest, model: Mapping[str, Sequence[int]]) -> list[str]:
    """Where the checkpoint's tensors are not those of ``model`` (name -> shape), one line each."""
    lines = []
    for name in [*model, *(name for name in manifest.tensors if name not in model)]:
        here, there = manifest.tensors.get(name), list(model[name]) if name in model else None
        if here != there:
            lines.append(f"{_show(here)} {name} where the model has {_show(there)}")
    return lines


def _show(shape: list[int] | None) -> str:
    return "no" if shape is None else " x ".join(map(str, shape)) or "a number"


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of manifest.json, its own hash within. Nothing is checked: ``write.certified`` does."""
    pieces, cuts = [vars(piece) for piece in manifest.pieces], [vars(cut) for cut in manifest.cuts]
    return seal({"format": FORMAT, **vars(manifest), "pieces": pieces, "cuts": cuts})


def write_manifest(manifest: Manifest, directory: Path) -> None:
    """Writes and syncs manifest.json into a directory of a file system, through a temporary file."""
    partial = f"{MANIFEST}.partial"
    with LocalFolder(directory).create(partial) as out:
        out.write(encode_manifest(manifest))
    (directory / partial).rename(directory / MANIFEST)
    sync_directory(directory)


def read_manifest(location: Location) -> Manifest:
    """The manifest of a checkpoint: sealed, well-formed and certified.

    Raises DamagedCheckpoint where it is missing, torn, changed, foreign or moved, or where the certificate fails.
    """
    folder = open_folder(location)
    path = folder.path(MANIFEST)
    try:
        content = folder.read_bytes(MANIFEST, LARGEST_MANIFEST_BYTES)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path} is missing") from None
    except UnfitFile as error:
        raise DamagedCheckpoint(f"{path} {error}") from None
    try:
        manifest = decode_manifest(content)
    except Malformed as error:
        raise DamagedCheckpoint(f"{path} {error}") from None
    named = step_of(folder.name)
    if named is not None and named != manifest.step:
        raise DamagedCheckpoint(f"{path} is of step {manifest.step}, and its folder is named {folder.name}")
    problems = certify(manifest)
    if problems:
        raise DamagedCheckpoint("; ".join(f"{path}: {problem}" for problem in problems))
    return manifest


def is_there(folder: Folder) -> bool:
    """Whether something lies under the manifest's name, fit to be read or not."""
    try:
        return folder.size(MANIFEST) is not None
    except UnfitFile:
        return True


def decode_manifest(content: bytes) -> Manifest:
    """What the bytes of manifest.json say. Raises Malformed where they are not sealed, or break the schema."""
    body = content[:-SEAL_BYTES] + b"}"
    if seal_of(body) != content[-SEAL_BYTES:]:
        raise Malformed("does not match its own hash")
    try:
        parsed = parse_body(body)
    except Malformed as error:
        raise Malformed(f"is no manifest of format {FORMAT}: {error}") from None
    return Manifest(
        step=parsed.step,
        scalars=asdict(parsed.scalars),
        tensors={name: list(shape) for name, shape in parsed.tensors.items()},
        kinds=parsed.kinds,
        pieces=parsed.pieces,
        files={file: vars(record) for file, record in parsed.files.items()},
        shards=parsed.shards,
        cuts=parsed.cuts,
    )


def seal(body: dict[str, Any]) -> bytes:
    """The body as JSON, with the hash of exactly these bytes as its last entry: no change of any byte goes unseen."""
    content = json.dumps(body, separators=(",", ":")).encode()
    return content[:-1] + seal_of(content)


def seal_of(content: bytes) -> bytes:
    """What ends a manifest whose JSON without it is ``content``."""
    return b',"xxh3_128":"' + xxhash.xxh3_128(content).hexdigest().encode() + b'"}'


SEAL_BYTES = len(seal_of(b""))


def whole_manifest(folder: Folder) -> Manifest:
    """The manifest; raises DamagedCheckpoint where it, its certificate or a file's size is wrong. Reads no tensor."""
    manifest = read_manifest(folder)
    problems = check_sizes(manifest, folder, sorted(manifest.files))
    if problems:
        raise DamagedCheckpoint(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))
    return manifest


def check_sizes(manifest: Manifest, location: Location, files: Iterable[str]) -> list[str]:
    """Which of these files are missing, no files of their own, or of another size, one line each."""
    folder, problems = open_folder(location), []
    for file in files:
        expected = manifest.files[file]["bytes"]
        try:
            size = folder.size(file)
        except UnfitFile as error:
            problems.append(f"{folder.path(file)} {error}")
            continue
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
        try:
            if not wrong and hash_in(folder, file, on_bytes) != manifest.files[file]["xxh3_128"]:
                wrong = [hash_problem(folder, file)]
        except FileNotFoundError:  # deleted since its size was looked at
            wrong = [f"{folder.path(file)} is missing"]
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
