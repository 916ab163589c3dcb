"""The schema of manifests and safetensors headers (fields, types, bounds), and their parsing from untrusted bytes.

pydantic checks types and bounds. Whether the parts of a manifest fit one another is checked by the certificate
(manifest.py). Parsing takes memory in proportion to the bytes, at most about 4 GiB, and an error is one line.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, FailFast, Field, TypeAdapter, ValidationError

from parallel.checkpoint.boxes import Box

FORMAT = 3  # format 2, which had no cuts, is still read
LARGEST_MANIFEST_BYTES = 256 << 20  # DeepSeek-V3 by ZeRO 3 on 16,384 ranks needs 9 MB (docs/scale.md)
LARGEST_HEADER_BYTES = 16 << 20  # about 100,000 pieces in one shard
LARGEST_VALUES = 24_000_000  # in one JSON text: its memory depends on their number, not on its bytes
LARGEST_OBJECT = 200_000  # entries of one JSON object
LARGEST_NUMBER = 2**63 - 1
MOST_DIMS = 4
LONGEST_NAME = 500  # characters
LONGEST_PART = 255  # bytes of a file's or folder's own name, on every usual file system
SHOWN = 60  # characters of a wrong value that a message shows


class Malformed(ValueError):
    """Bytes do not follow the schema. The message names the place, in one line."""


def _printable(text: str) -> str:
    """The text itself. Raises ValueError where it has an invisible or control character, or a lone surrogate."""
    if not text.isprintable():
        raise ValueError("must hold printable characters only")
    return text


def _without_slash(kind: str) -> str:
    """The kind itself. Raises ValueError where it has a /, which in a key separates the kind from the tensor's name."""
    if "/" in kind:
        raise ValueError("must hold no /")
    return kind


def _inside(file: str) -> str:
    """The path itself. Raises ValueError unless it leads to a file below a checkpoint's folder that is no manifest."""
    parts = file.split("/")
    if "\\" in file or any(part in ("", ".", "..") or part != part.strip() for part in parts):
        raise ValueError("must be a path below the checkpoint's folder")
    if any(len(part.encode()) > LONGEST_PART for part in parts):
        raise ValueError(f"must have names of at most {LONGEST_PART} bytes")
    if parts[-1].startswith("manifest."):
        raise ValueError("must not be a manifest")
    return file


Count = Annotated[int, Field(ge=0, le=LARGEST_NUMBER)]
Size = Annotated[int, Field(ge=1, le=LARGEST_NUMBER)]
Starts = Annotated[tuple[Count, ...], Field(max_length=MOST_DIMS), FailFast()]
Shape = Annotated[tuple[Size, ...], Field(max_length=MOST_DIMS), FailFast()]
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME), AfterValidator(_printable)]
File = Annotated[Name, AfterValidator(_inside)]
Kind = Annotated[Name, AfterValidator(_without_slash)]
Stride = Annotated[int, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]
Run = tuple[Size, Size, Count, Stride]  # number of ranges, elements of each, the first one's shard, shard stride


@dataclass(frozen=True)
class Piece:
    """One box of one logical tensor, with the file and the key under which its elements are stored."""

    kind: Name  # weight, exp_avg, exp_avg_sq, momentum_buffer, buffer
    name: Name  # of the logical tensor
    start: Starts
    shape: Shape
    file: File
    key: Name  # in the safetensors file

    @property
    def box(self) -> Box:
        """The box of the elements that the piece holds."""
        return Box(self.start, self.shape)


@dataclass(frozen=True)
class Cut:
    """One box of one logical tensor whose flattened elements are stored, range after range, in several shards.

    This describes ZeRO's partition of a box in a few numbers. A run is ``count`` ranges of ``numel`` elements each; the
    first is in the shard with the run's shard number, and each following one ``stride`` shards further. Shards are
    numbered by their position in the manifest's ``shards``. A range is stored in its shard as the boxes of
    ``boxes_of_range``, each under the key ``key_of(kind, name, start)``, for every kind alike.
    """

    kinds: Annotated[tuple[Kind, ...], Field(min_length=1), FailFast()]
    name: Name
    start: Starts
    shape: Shape
    runs: Annotated[list[Run], FailFast()]

    @property
    def box(self) -> Box:
        """The box of the elements of all ranges."""
        return Box(self.start, self.shape)


@dataclass(frozen=True)
class Layout:
    """The layout of the run that wrote a checkpoint, for information only."""

    ranks: Size
    pp: Size
    dp: Size
    cp: Size
    tp: Size
    ep: Size
    zero: Annotated[int, Field(ge=0, le=3)]
    precision: Name


@dataclass(frozen=True)
class Scalars:
    """The training state besides tensors. A loss may be NaN, as in a run that has diverged."""

    consumed: Count
    skipped: Annotated[list[tuple[Count, Count]], FailFast()]
    tokens: Count
    updates: Count
    loss_scaler: dict[Name, Annotated[float, Field(allow_inf_nan=False)]]
    heldout: tuple[Count, float] | None = None
    losses: Annotated[list[float], FailFast()] = field(default_factory=list)  # older checkpoints lack it
    dealing: Count = 1  # the order in which samples were dealt to the sources; older checkpoints lack it
    written_by: Layout | None = None  # None: written by code that does not train, as a proof's plain side


@dataclass(frozen=True)
class FileRecord:
    """A file's size in bytes and its hash."""

    bytes: Count
    xxh3_128: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\z")]


@dataclass(frozen=True)
class Body:
    """The content of a manifest's JSON. Each element of each kind of a tensor is in exactly one piece or cut."""

    format: Literal[2, 3]
    step: Count
    scalars: Scalars
    tensors: dict[Name, Shape]
    kinds: dict[Name, Annotated[list[Name], FailFast()]]
    pieces: Annotated[list[Piece], FailFast()]
    files: dict[File, FileRecord]
    shards: Annotated[list[File], FailFast()] = field(default_factory=list)
    cuts: Annotated[list[Cut], FailFast()] = field(default_factory=list)


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a safetensors file; offsets count from the end of the header."""

    dtype: Name
    shape: Shape
    data_offsets: tuple[Count, Count]


@dataclass(frozen=True)
class Index:
    """The JSON index that comes with several safetensors files: each tensor's file."""

    weight_map: dict[Name, Name]
    metadata: dict[str, Any] | None = None


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint)


def parse_body(content: bytes) -> Body:
    """A manifest's content, parsed from its JSON. Raises Malformed."""
    body: Body = _parse(Body, content)
    if body.format < FORMAT and (body.cuts or body.shards):
        raise Malformed(f"format={body.format}: has neither cuts nor shards")
    return body


def parse_header(content: bytes) -> dict[str, HeaderEntry]:
    """The entries of a safetensors header, by key, parsed from its JSON. Raises Malformed."""
    return _parse(dict[Name, HeaderEntry], content)


def parse_any_header(content: bytes) -> dict[str, HeaderEntry]:
    """The entries of any safetensors file's header, by key; its metadata is ignored. Raises Malformed."""
    _check_json(content)
    tree = json.loads(content)
    if not isinstance(tree, dict):
        raise Malformed("is no object")
    tree.pop("__metadata__", None)
    return _parse(dict[Name, HeaderEntry], json.dumps(tree).encode())


def parse_index(content: bytes) -> dict[str, str]:
    """Each tensor's file, parsed from the index of several safetensors files. Raises Malformed."""
    index: Index = _parse(Index, content)
    return index.weight_map


def _parse(hint: Any, content: bytes) -> Any:
    _check_json(content)
    try:
        return _adapter(hint).validate_json(content, strict=True, extra="forbid")
    except ValidationError as error:
        raise Malformed(_first_line(error)) from None


def _check_json(content: bytes) -> None:
    """Raises Malformed where the bytes are no JSON, or have too many values, or a key twice in one object."""
    if content.count(b",") + content.count(b"[") + content.count(b"{") > LARGEST_VALUES:
        raise Malformed(f"holds more than {LARGEST_VALUES:,} values")
    try:
        json.loads(content, object_pairs_hook=_check_keys)
    except RecursionError:
        raise Malformed("is nested too deeply") from None
    except Malformed:
        raise
    except ValueError as error:  # of json: no JSON, or no UTF-8
        raise Malformed(f"is no JSON ({error})") from None


def _check_keys(pairs: Sequence[tuple[str, Any]]) -> None:
    """Raises Malformed for a key that comes twice, which JSON readers treat differently, and for too many entries.

    It returns nothing, so that no object is kept in memory.
    """
    if len(pairs) > LARGEST_OBJECT:
        raise Malformed(f"holds an object of {len(pairs):,} entries; {LARGEST_OBJECT:,} are the most")
    if len({key for key, _ in pairs}) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise Malformed(f"holds {shorten(twice)} twice in one object")


def _first_line(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_context=False)[0] if error.error_count() < 1000 else None
    if fault is None:
        return f"breaks the schema in {error.error_count():,} places"
    place = ".".join(str(part) for part in fault["loc"])
    found = "" if isinstance(fault["input"], dict | list) else f"={shorten(fault['input'])}"
    rule = fault["msg"].removeprefix("Value error, ")
    return f"{shorten(place, 3 * SHOWN)}{found}: {rule[:1].lower()}{rule[1:]}" if place else rule


def shorten(value: Any, most: int = SHOWN) -> str:
    """An untrusted value as text for a message: on one line, escaped, and at most ``most`` characters of it."""
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a huge number"
    text = value if isinstance(value, str) else str(value)
    text = text if len(text) <= most else text[: most - 3] + "..."
    return text if text.isprintable() else ascii(text)[1:-1]
