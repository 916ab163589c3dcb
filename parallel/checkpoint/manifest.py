"""The manifest of a checkpoint: writing, reading and certifying it. Without a valid one a folder is no checkpoint."""

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
BUFFER = "buffer"  # the kind of tensors that are no parameters: router biases
HASH_CHUNK = 1 << 20
MOST_RANGES = 1 << 25  # of all cuts: ZeRO 3 on 16,384 ranks has 16 million of DeepSeek-V3's 671B
MOST_PROBLEMS = 20  # lines that report a certificate's failure

Location = Folder | Path | str  # of one checkpoint: its opened folder, a directory, or a URL


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete, changed or of another format; the message names the file."""


@dataclass
class Manifest:
    """The content of a manifest: scalars, logical tensors, where their elements are, and each file's size and hash."""

    step: int
    scalars: dict[str, Any]  # data position, optimizer's step, loss scaler
    tensors: dict[str, list[int]]  # logical name -> shape
    kinds: dict[str, list[str]]  # kind -> the names that have it
    pieces: list[Piece] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # file -> bytes, xxh3_128
    shards: list[str] = field(default_factory=list)  # the files that the cuts name by number
    cuts: list[Cut] = field(default_factory=list)

    def every_piece(self) -> Iterator[Piece]:
        """All pieces in all files, with those of the cuts one by one: millions for a large model."""
        yield from self.pieces
        for cut in self.cuts:
            yield from every_piece_of(cut, self.shards)


def certify(manifest: Manifest) -> list[str]:
    """The coverage certificate: a message for each fault of the manifest, at most MOST_PROBLEMS; empty if it holds.

    It holds if every element of every logical tensor, in every kind, is stored exactly once, and if every piece is in a
    file that is listed with its hash and is large enough for its pieces, under a key that no other piece has. Saving,
    loading and verifying all rely on it.
    """
    return list(islice(_faults(manifest), MOST_PROBLEMS))


def _faults(manifest: Manifest) -> Iterator[str]:
    boxes: dict[tuple[str, str], list[Box]] = {}
    for piece in manifest.pieces:
        boxes.setdefault((piece.kind, piece.name), []).append(piece.box)
    for cut in manifest.cuts:
        for kind in cut.kinds:
            boxes.setdefault((kind, cut.name), []).append(cut.box)
    known: dict[tuple[str, tuple[Box, ...]], str | None] = {}  # moments mostly have the same boxes as their weight
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
    """Messages for faults of the cuts' runs and shards; their boxes are checked elsewhere."""
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
        return  # the code below would look for ranges in shards that do not exist
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
    """A message for each tensor that the checkpoint and ``model`` (name -> shape) do not have in the same shape."""
    lines = []
    for name in [*model, *(name for name in manifest.tensors if name not in model)]:
        here, there = manifest.tensors.get(name), list(model[name]) if name in model else None
        if here != there:
            lines.append(f"{_show(here)} {name} where the model has {_show(there)}")
    return lines


def _show(shape: list[int] | None) -> str:
    return "no" if shape is None else " x ".join(map(str, shape)) or "a number"


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of manifest.json, with its own hash in it. Nothing is checked here; ``write.certified`` does that."""
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
    """The manifest of a checkpoint, after checking its hash, its schema, its folder's name and its certificate.

    Raises DamagedCheckpoint where it is missing or one of these checks fails.
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
    """Whether there is anything under the manifest's name, even if it is no regular file."""
    try:
        return folder.size(MANIFEST) is not None
    except UnfitFile:
        return True


def decode_manifest(content: bytes) -> Manifest:
    """The manifest, parsed from the bytes of manifest.json. Raises Malformed where its hash or the schema is broken."""
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
    """The body as JSON, with a hash of these bytes as its last entry, so that any changed byte is detected."""
    content = json.dumps(body, separators=(",", ":")).encode()
    return content[:-1] + seal_of(content)


def seal_of(content: bytes) -> bytes:
    """The end of a manifest, with the hash, from its JSON without that entry (``content``)."""
    return b',"xxh3_128":"' + xxhash.xxh3_128(content).hexdigest().encode() + b'"}'


SEAL_BYTES = len(seal_of(b""))


def whole_manifest(folder: Folder) -> Manifest:
    """The manifest of a folder. Raises DamagedCheckpoint where it, its certificate or a file's size is wrong.

    It reads no tensor.
    """
    manifest = read_manifest(folder)
    problems = check_sizes(manifest, folder, sorted(manifest.files))
    if problems:
        raise DamagedCheckpoint(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))
    return manifest


def check_sizes(manifest: Manifest, location: Location, files: Iterable[str]) -> list[str]:
    """A message for each of these files that is missing, is no regular file, or has another size."""
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
    """A message for each of these files whose size or hash is wrong. ``on_bytes``: called with each read's bytes."""
    folder, problems = open_folder(location), []
    for file in files:
        wrong = check_sizes(manifest, folder, [file])
        try:
            if not wrong and hash_in(folder, file, on_bytes) != manifest.files[file]["xxh3_128"]:
                wrong = [hash_problem(folder, file)]
        except FileNotFoundError:  # deleted since its size was checked
            wrong = [f"{folder.path(file)} is missing"]
        problems += wrong
    return problems


def hash_problem(folder: Folder, file: str) -> str:
    """The message for a file that does not match its hash."""
    return f"{folder.path(file)} does not match its hash in the manifest"


def hash_file(path: Path) -> str:
    """xxh3_128 of a file's bytes, in hexadecimal."""
    return hash_in(LocalFolder(path.parent), path.name)


def hash_in(folder: Folder, file: str, on_bytes: Callable[[int], None] | None = None) -> str:
    """xxh3_128 of the bytes of a file in a folder, in hexadecimal. ``on_bytes`` is called with each read's bytes."""
    digest, view = xxhash.xxh3_128(), memoryview(bytearray(HASH_CHUNK))
    with folder.open(file) as content:
        while got := content.readinto(view):
            digest.update(view[:got])
            if on_bytes is not None:
                on_bytes(got)
    return digest.hexdigest()
