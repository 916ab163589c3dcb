"""The documents in a slice of the input, as strings."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import zstandard

from data.config import SourceConfig
from data.errors import DataError, refuse
from data.hub import hub_records
from data.shards import Shard, Slice
from data.sources import InputFile

MEND = "mend it, or leave it out with exclude"
LOOKED_AT = 4096  # bytes of a file, to tell whether it is text


def read_documents(source: SourceConfig, shard: Shard, key: str) -> Iterator[tuple[str, float]]:
    """Each document of the shard, with the bytes of input it stands for (they add up to the shard's ``n_bytes``).

    Empty documents are left out. ``key`` names the source in errors. Raises DataError where the input cannot be read
    or lacks ``text_key``.
    """
    for piece in shard:
        reported = 0.0
        for text, done in _read_slice(source, piece, key):
            done = min(done, piece.n_bytes)
            if text:
                yield text, done - reported
                reported = done
        if piece.n_bytes > reported:
            yield "", piece.n_bytes - reported


def check_text(files: Sequence[InputFile], key: str) -> None:
    """Raises DataError where files that are read as text begin like something else: a picture, an archive, UTF-16.

    No text in UTF-8 needs a NUL byte, and nearly everything else has one soon.
    """
    other = {file.path: None for file in files if file.kind == "text" and not _begins_like_text(file.path)}
    if other:
        first = next(iter(other))
        more = f" (one of {len(other)} such files of {key})" if len(other) > 1 else ""
        ending = os.path.splitext(first)[1]
        all_alike = ending and all(file.path in other for file in files if file.path.endswith(ending))
        pattern = f"**/*{ending}" if all_alike else f"**/{os.path.basename(first)}"
        remedy = f"convert it to UTF-8, jsonl (also .gz, .zst) or parquet, or leave it out with exclude: ['{pattern}']"
        raise refuse(f"{first}{more}", "is not text: it holds NUL bytes", remedy)


def _begins_like_text(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return b"\0" not in file.read(LOOKED_AT)
    except OSError as error:
        raise refuse(path, f"cannot be read ({error})", MEND) from error


def _read_slice(source: SourceConfig, piece: Slice, key: str) -> Iterator[tuple[str, float]]:
    """Each document of a slice, and how many of the slice's bytes have been read after it."""
    try:
        match piece.kind:
            case "text":
                yield _read_text(piece), piece.n_bytes
            case "jsonl":
                yield from _parse_lines(_lines_within(piece), source, piece, key)
            case "jsonl.gz" | "jsonl.zst":
                with _decompress(piece) as stream:
                    yield from _parse_lines(_count_lines(stream), source, piece, key)
            case "parquet":
                yield from _read_parquet(source, piece, key)
            case "hub":
                for record in hub_records(source, piece.start, key):
                    yield _text_of(record, source, f"{piece.path}", key), 0
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise refuse(piece.path, f"cannot be read ({error})", MEND) from error


def _read_text(piece: Slice) -> str:
    """The file, or those of its lines that begin in the slice; bytes that are not UTF-8 become U+FFFD."""
    if piece.whole:
        with open(piece.path, "rb") as file:
            return file.read().decode("utf-8", errors="replace")
    return b"".join(line for line, _ in _lines_within(piece)).decode("utf-8", errors="replace")


def _lines_within(piece: Slice) -> Iterator[tuple[bytes, int]]:
    """The lines that begin in [start, stop), each with the bytes of the slice read so far."""
    with open(piece.path, "rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # the rest of a line that began earlier; just the newline where a line begins at start
        position = file.tell()
        while position < piece.stop and (line := file.readline()):
            position += len(line)
            yield line, position - piece.start


def _count_lines(stream: Iterable[bytes]) -> Iterator[tuple[bytes, int]]:
    position = 0
    for line in stream:
        position += len(line)
        yield line, position


def _decompress(piece: Slice) -> io.BufferedIOBase:
    if piece.kind == "jsonl.gz":
        return gzip.open(piece.path, "rb")
    return io.BufferedReader(zstandard.open(piece.path, "rb", dctx=zstandard.ZstdDecompressor()))


def _parse_lines(
    lines: Iterator[tuple[bytes, int]], source: SourceConfig, piece: Slice, key: str
) -> Iterator[tuple[str, float]]:
    for line, done in lines:
        if line.isspace():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            where = f"{piece.path}: the line that ends {done} bytes after byte {piece.start} of its text"
            raise refuse(where, f"is not JSON ({error})", MEND) from error
        yield _text_of(record, source, piece.path, key), done


def _read_parquet(source: SourceConfig, piece: Slice, key: str) -> Iterator[tuple[str, float]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(piece.path) as file:
            if source.text_key not in file.schema_arrow.names:
                raise _no_text_key(file.schema_arrow.names, source, piece.path, key)
            n_rows, row = file.metadata.row_group(piece.start).num_rows, 0
            for batch in file.iter_batches(1024, row_groups=[piece.start], columns=[source.text_key]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield _text_of({source.text_key: text}, source, piece.path, key), piece.n_bytes * row / n_rows
    except pyarrow.ArrowInvalid as error:
        raise refuse(piece.path, f"cannot be read as parquet ({error})", MEND) from error


def _text_of(record: Any, source: SourceConfig, path: str, key: str) -> str:
    """The record's document; "" where it is null."""
    if not isinstance(record, dict) or source.text_key not in record:
        raise _no_text_key(list(record) if isinstance(record, dict) else [], source, path, key)
    text = record[source.text_key]
    if not isinstance(text, str | None):
        found = f"{key}.text_key={source.text_key!r}"
        raise refuse(found, f"must hold text but holds {type(text).__name__} in {path}", "name another field")
    return text or ""


def _no_text_key(names: list[str], source: SourceConfig, path: str, key: str) -> DataError:
    there = ", ".join(map(str, names)) or "no named fields"
    found = f"{key}.text_key={source.text_key!r}"
    return refuse(
        found, f"is not in a record of {path}, which holds {there}", "set text_key to the field with the text"
    )
