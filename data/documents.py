"""The documents in a slice of the input, as strings."""

import json
import os
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, assert_never

import zstandard

from data.chat import chat_of, record_of_columns
from data.cleaning.kept import counts_of, read_kept
from data.columns import no_text_key, read_arrow, read_parquet
from data.config import SourceConfig
from data.errors import DataError, reason_of, refuse
from data.hub import hub_records
from data.lines import MEND, line_number, read_lines
from data.shards import Shard, Slice
from data.sources import InputFile, input_files, is_raw, reads_files
from data.tally import EMPTY, Tally
from data.warc import read_warc

LISTED = 8  # patterns, at most, in a remedy
LOOKED_AT = 1 << 16  # bytes of a file, to tell whether it is text


def read_documents(
    source: SourceConfig, shard: Shard, key: str, tally: Tally | None = None
) -> Iterator[tuple[str, float]]:
    """(text, bytes of input) of each document of the shard; the bytes add up to the shard's ``n_bytes``.

    Empty documents are left out, and so are records that cannot be read; ``tally`` counts all. An empty text may
    account for the rest of a slice's bytes. ``key`` names the source in errors. Raises DataError where the input cannot
    be read, or where a larger share of records than the source's ``max_bad_share`` is not UTF-8, not JSON or without
    ``text_key``.
    """
    tally = tally if tally is not None else Tally(source.max_bad_share)
    for piece in shard:
        reported = 0.0
        for text, done in _read_slice(source, piece, key, tally):
            done = min(done, piece.n_bytes)
            if text == "" and not piece.whole and piece.kind == "text":
                continue  # a part of a large file in which no line begins
            tally.n_documents += 1
            if text:
                yield text, done - reported
                reported = done
            elif text is not None:
                tally.drop(EMPTY)
        if piece.n_bytes > reported:
            yield "", piece.n_bytes - reported
    tally.check(key)


def files_to_read(source: SourceConfig, key: str) -> list[InputFile]:
    """The files of a source of text; empty for a dataset that is streamed. ``key`` names the source in errors.

    Raises DataError where nothing matches, where a file is not text, and where the source is token files.
    """
    if not is_raw(source):
        rule = "must be text, and is token files, or a URL of such"
        raise refuse(f"{key}.path={source.path!r}", rule, "give the text that they were made of")
    files = input_files(source, key) if reads_files(source) else []
    check_text(files, key)
    return files


def check_text(files: Sequence[InputFile], key: str) -> None:
    """Raises DataError where files that are read as text begin like something else: a picture, UTF-16, Latin-1.

    Text in UTF-8 has no use for NUL bytes, and nearly all other files have one near their beginning.
    """
    texts = [file.path for file in files if file.kind == "text"]
    wrong = {path: rule for path in texts if (rule := _why_not_text(path)) is not None}
    if wrong:
        first = next(iter(wrong))
        more = f" (one of {len(wrong)} such files of {key})" if len(wrong) > 1 else ""
        is_of_text = {os.path.splitext(path)[1] for path in set(texts).difference(wrong)} | {""}
        endings = {path: os.path.splitext(path)[1] for path in wrong}
        patterns = {f"*{end}" if end not in is_of_text else os.path.basename(path) for path, end in endings.items()}
        listed = ", ".join(f"'**/{pattern}'" for pattern in sorted(patterns)[:LISTED])
        leave_out = f"leave {'it' if len(wrong) == 1 else 'them'} out with exclude: [{listed}]"
        remedy = f"convert it to UTF-8, jsonl (also .gz, .zst) or parquet, or {leave_out}"
        raise refuse(f"{first}{more}", wrong[first], remedy)


def _why_not_text(path: str) -> str | None:
    """The rule broken by a file that does not begin as text does; None where it does."""
    try:
        with open(path, "rb") as file:
            data = file.read(LOOKED_AT)
    except OSError as error:
        raise refuse(path, f"cannot be read ({error.strerror})", MEND) from error
    if b"\0" in data:
        return "is not text: it holds NUL bytes"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if error.end < LOOKED_AT:  # else a character of several bytes that goes on
            return _not_utf8(error, 0)
    return None


def _not_utf8(error: UnicodeDecodeError, start: int) -> str:
    """The rule broken by text that is not UTF-8; the text begins at byte ``start`` of its file."""
    byte = error.object[error.start]
    return f"is not UTF-8: byte {start + error.start} is 0x{byte:02x} (Latin-1 or the like)"


def _read_slice(source: SourceConfig, piece: Slice, key: str, tally: Tally) -> Iterator[tuple[str | None, float]]:
    """(text, bytes of the slice read so far) of each document of a slice; the text is None for a bad one."""
    try:
        match piece.kind:
            case "text":
                yield _read_text(piece), piece.n_bytes
            case "jsonl" | "jsonl.gz" | "jsonl.zst":
                yield from _read_records(source, piece, key, tally)
            case "parquet":
                yield from ((text, part * piece.n_bytes) for text, part in read_parquet(source, piece, key, tally))
            case "arrow":
                yield from ((text, part * piece.n_bytes) for text, part in read_arrow(source, piece, key, tally))
            case "warc":
                yield from ((text, part * piece.n_bytes) for text, part in read_warc(piece, tally))
            case "hub":
                for record in hub_records(source, piece.start, key):
                    if source.chat is not None:
                        record = record_of_columns(record)
                    yield _text_of(record, source, piece.path, key, tally), 0
            case "cleaned":
                yield from _read_cleaned(piece, tally)
            case _:
                assert_never(piece.kind)
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise refuse(piece.path, f"cannot be read ({reason_of(error)})", MEND) from error


def _read_cleaned(piece: Slice, tally: Tally) -> Iterator[tuple[str, float]]:
    """(text, bytes read so far) of each text that cleaning kept; the dropped ones are counted at the end."""
    path, n_bytes = Path(piece.path), 0
    for text in read_kept(path):
        n_bytes += len(text.encode())
        yield text, n_bytes
    _, dropped, named = counts_of(path)
    tally.take(dropped, named)


def _read_text(piece: Slice) -> str:
    """The whole file's text, or the lines that begin in the slice."""
    if piece.whole:
        with open(piece.path, "rb") as file:
            data, start = file.read(), 0
    else:
        lines = list(read_lines(piece))
        data, start = b"".join(line for line, _ in lines), lines[0][1] if lines else 0
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise refuse(piece.path, _not_utf8(error, start), f"convert it to UTF-8; {MEND}") from error


def _read_records(source: SourceConfig, piece: Slice, key: str, tally: Tally) -> Iterator[tuple[str | None, float]]:
    for line, start in read_lines(piece):
        if line.isspace():
            continue
        done = start - piece.start + len(line)
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "not JSON"
            tally.bad(reason, partial(_bad_line, piece, start, _why_not_json(error, start)))
            yield None, done
        else:
            yield _text_of(record, source, piece.path, key, tally), done


def _bad_line(piece: Slice, start: int, why: str) -> DataError:
    """The refusal of a line. It reads the file up to the line to find the line's number."""
    return refuse(f"{piece.path}: line {line_number(piece, start)} (from byte {start} on)", why, MEND)


def _why_not_json(error: Exception, start: int) -> str:
    match error:
        case UnicodeDecodeError():
            return _not_utf8(error, start)
        case RecursionError():
            return "is nested too deeply"
        case _:
            return f"is not JSON ({reason_of(error).partition(';')[0]})"


def _text_of(record: Any, source: SourceConfig, path: str, key: str, tally: Tally) -> str | None:
    """The record's text or chat; "" where it is null, None where the record is bad, which ``tally`` counts."""
    if source.chat is not None:
        return chat_of(record, source, path, key, tally)
    if not isinstance(record, dict) or source.text_key not in record:
        names = list(record) if isinstance(record, dict) else []
        tally.bad("no text_key", lambda: no_text_key(names, source, path, key))
        return None
    text = record[source.text_key]
    if not isinstance(text, str | None):
        found, rule = f"{key}.text_key={source.text_key!r}", f"must hold text but holds {type(text).__name__} in {path}"
        tally.bad("not text", lambda: refuse(found, rule, "name another field"))
        return None
    return text or ""
