"""Fuzz target: any bytes as a jsonl file."""

import json
from pathlib import Path

from data.config import SourceConfig
from data.documents import read_documents
from data.errors import DataError
from data.shards import plan_shards
from data.sources import input_files

SHARD_BYTES = 64  # so that most files are cut into several slices


def seeds() -> list[bytes]:
    """Valid files, with every kind of JSON value."""
    records = [
        {"text": "a document"},
        {"text": "naïve ☕ \ud800", "n": 1, "nested": {"a": [1, [2, {"b": None}]]}},
        {"text": None, "big": 10**30, "float": 1e-300, "yes": True},
        {"text": "", "text_": "not this one"},
        {"id": "x" * 100, "text": "y\n" * 50},
    ]
    lines = [json.dumps(record).encode() for record in records]
    plain = json.dumps(records[0], ensure_ascii=False).encode()
    return [
        *lines,
        b"\n".join(lines) + b"\n",
        b"\n\n".join(lines),
        b"\xef\xbb\xbf" + plain,
        plain + b"\r\n" + plain,
        b"",
    ]


def check(data: bytes, folder: Path) -> bool:
    """Whether ``data`` is accepted as a jsonl file, read whole and in slices.

    Exceptions other than a refusal of one line escape. Raises AssertionError where slices give other documents than the
    whole file, or only one of the two is refused.
    """
    (folder / "a.jsonl").write_bytes(data)
    whole, cut = (_read(folder / "a.jsonl", shard_bytes) for shard_bytes in (len(data) + 1, SHARD_BYTES))
    assert whole == cut
    return whole is not None


def _read(path: Path, shard_bytes: int) -> list[str] | None:
    """The documents, or None where they are refused."""
    source = SourceConfig(path=str(path))
    try:
        shards = plan_shards(source, input_files(source, "data.sources[0]"), shard_bytes, "data.sources[0]")
        return [text for shard in shards for text, _ in read_documents(source, shard, "data.sources[0]") if text]
    except DataError as error:
        (line,) = str(error).splitlines()
        assert str(path) in line, line
        return None
