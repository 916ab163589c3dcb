"""Bad documents: counted, named, left out within the stated share; each one that comes in is kept or dropped."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.config import ChatConfig, DataConfig, SourceConfig
from data.documents import read_documents
from data.errors import DataError
from data.prepare import prepare
from data.shards import plan_shards
from data.shardwriter import dropped_from
from data.sources import input_files
from data.tally import NAMED, Tally
from launcher.commands.prepare import dropped_lines

GOOD = [f"good {number}" for number in range(9)]
BAD = {
    "not UTF-8": '{"text": "caf\xe9"}'.encode("latin-1"),
    "not JSON": b'{"text": "cut off he',
    "no text_key": b'{"body": "x"}',
    "not text": b'{"text": 7}',
    "empty": b'{"text": ""}',
}


def lines_with(*bad: bytes) -> bytes:
    """Jsonl of all good documents, with bad lines in between."""
    good = [json.dumps({"text": text}).encode() for text in GOOD]
    return b"\n".join([*good[:4], *bad, *good[4:]]) + b"\n"


def read(path: Path, share: float, shard_bytes: int = 10**6) -> tuple[list[str], list[Tally]]:
    source, key = SourceConfig(path=str(path), max_bad_share=share), "data.sources[0]"
    texts, tallies = [], []
    for shard in plan_shards(source, input_files(source, key), shard_bytes, key):
        tallies.append(Tally(share))
        texts += [text for text, _ in read_documents(source, shard, key, tallies[-1]) if text]
    return texts, tallies


@pytest.mark.parametrize("form", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("reason", BAD)
def test_a_bad_line_is_left_out_and_counted(tmp_path: Path, reason: str, form: str) -> None:
    path, content = tmp_path / f"a{form}", lines_with(BAD[reason])
    path.write_bytes(gzip.compress(content) if form.endswith("gz") else content)
    texts, (tally,) = read(path, 0.1)
    assert (texts, tally.dropped, tally.n_documents) == (GOOD, {reason: 1}, len(GOOD) + 1)
    assert len(tally.named) == (reason != "empty")
    assert all(str(path) in line for line in tally.named)
    if reason in ("not UTF-8", "not JSON"):
        assert tally.named[0].startswith(f"{path}: line 5 (from byte 76 on) is {reason}")
    if reason != "empty":
        with pytest.raises(DataError):
            read(path, 0.0)


def test_a_line_that_is_cut_at_the_files_end(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_with()[:-4])
    texts, (tally,) = read(tmp_path / "a.jsonl", 0.2)
    assert (texts, tally.dropped) == (GOOD[:-1], {"not JSON": 1})


def test_a_row_of_parquet_that_is_not_utf8(tmp_path: Path) -> None:
    texts = pyarrow.array([b"a", b"\xff", b"b", None, b""]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    found, (tally,) = read(tmp_path / "a.parquet", 0.3)
    assert (found, tally.dropped, tally.n_documents) == (["a", "b"], {"not UTF-8": 1, "empty": 2}, 5)
    assert "row 1 is not UTF-8" in tally.named[0]


STRINGS = {
    "text": pyarrow.string(),
    "large text": pyarrow.large_string(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
}


@pytest.mark.parametrize("kind", STRINGS)
def test_a_row_of_arrow_that_is_not_utf8(tmp_path: Path, kind: str) -> None:
    values = [b"a", b"\xff", b"b", None, b""]
    binary = pyarrow.large_binary() if kind == "large text" else pyarrow.binary()
    texts = pyarrow.array(values, binary).view(pyarrow.large_string() if kind == "large text" else pyarrow.string())
    if kind == "dictionary":
        indices = pyarrow.array([0, 1, 2, None, 4], pyarrow.int32())
        texts = pyarrow.DictionaryArray.from_arrays(indices, texts.take([0, 1, 2, 0, 4]))
    assert texts.type == STRINGS[kind]
    whole = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), whole.schema) as writer:
        writer.write_table(whole)
    found, (tally,) = read(tmp_path / "a.arrow", 0.3)
    assert (found, tally.dropped, tally.n_documents) == (["a", "b"], {"not UTF-8": 1, "empty": 2}, 5)
    assert "a.arrow: row 1 is not UTF-8" in tally.named[0]
    with pytest.raises(DataError, match=r"a\.arrow: row 1 is not UTF-8"):
        read(tmp_path / "a.arrow", 0.0)


def test_a_chat_of_arrow_that_is_not_utf8_is_left_out(tmp_path: Path) -> None:
    said = pyarrow.array([b"a", b"\xff", b"b"]).view(pyarrow.string())
    each = pyarrow.StructArray.from_arrays([pyarrow.array(["assistant"] * 3), said], ["role", "content"])
    whole = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 1, 2, 3], each)})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), whole.schema) as writer:
        writer.write_table(whole)
    source = SourceConfig(path=str(tmp_path / "a.arrow"), chat=ChatConfig(), max_bad_share=0.5)
    (shard,), tally = plan_shards(source, input_files(source, "key"), 10**6, "key"), Tally(0.5)
    chats = [text for text, _ in read_documents(source, shard, "key", tally) if text]
    assert [json.loads(chat)["messages"][0]["content"] for chat in chats] == ["a", "b"]
    assert tally.dropped == {"not UTF-8": 1} and "row 1 is not UTF-8" in tally.named[0]


FILES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "a gzip that ends early": ("a.jsonl.gz", lambda: gzip.compress(lines_with())[:-9], "Compressed file ended"),
    "a line without end": ("a.jsonl", lambda: b'{"text": "' + b"x" * ((1 << 26) + 9), "is longer than 67108864 bytes"),
    "Latin-1 text": (
        "a.jsonl",
        lambda: b"\n".join(['{"text": "\xe9"}'.encode("latin-1")] * 9),
        "9 of 9 documents cannot",
    ),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_bad_file_is_refused_whatever_the_share(tmp_path: Path, fault: str) -> None:
    name, content, words = FILES[fault]
    (tmp_path / name).write_bytes(content())
    with pytest.raises(DataError, match=words):
        read(tmp_path / name, 0.5)


def test_a_parquet_without_the_column_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), str(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"is not in a record of .*, which holds body"):
        read(tmp_path / "a.parquet", 0.5)


def test_more_than_the_share_is_refused_by_the_first_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines_with(BAD["not JSON"], BAD["not text"]))
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.jsonl", 0.1)
    (line,) = caught.value.problems
    assert line.startswith("data.sources[0].max_bad_share=0.1: 2 of 11 documents cannot be read, the first one: ")
    assert "line 5 (from byte 76 on) is not JSON" in line


@given(st.lists(st.sampled_from(sorted(BAD)), max_size=9), st.integers(20, 400))
def test_what_comes_in_is_kept_or_dropped(tmp_path_factory, reasons: list[str], shard_bytes: int) -> None:
    path = tmp_path_factory.mktemp("t") / "a.jsonl"
    path.write_bytes(lines_with(*(BAD[reason] for reason in reasons)))
    source = SourceConfig(path=str(path), max_bad_share=0.5)
    n_documents = n_kept = 0
    dropped: dict[str, int] = {}
    for shard in plan_shards(source, input_files(source, "k"), shard_bytes, "k"):
        tally = Tally(1.0)
        n_kept += sum(bool(text) for text, _ in read_documents(source, shard, "k", tally))
        n_documents += tally.n_documents
        assert len(tally.named) <= NAMED
        for reason, count in tally.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    assert n_kept == len(GOOD)
    assert n_documents == n_kept + sum(dropped.values()) == len(GOOD) + len(reasons)
    assert dropped == {reason: reasons.count(reason) for reason in set(reasons)}


@pytest.mark.parametrize("line", [b"7", b'"a text"', b'["text"]', b"null"])
def test_a_line_that_is_no_object_has_no_text_key(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines_with(line))
    texts, (tally,) = read(path, 0.1)
    assert (texts, tally.dropped) == (GOOD, {"no text_key": 1})
    with pytest.raises(DataError, match=r"text_key='text' is not in a record of .*a\.jsonl"):
        read(path, 0.0)


def test_prepare_tells_what_it_left_out(tmp_path: Path) -> None:
    """Once it is done, from the records of its shards."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.jsonl").write_bytes(lines_with(BAD["not JSON"], BAD["empty"]))
    source = SourceConfig(path=str(tmp_path / "texts"), max_bad_share=0.1)
    config = DataConfig(sources=(source,), token_dir=str(tmp_path / "t"), heldout_fraction=0.2, workers=1)
    prepared = prepare(config, vocab_size=300)
    assert prepared is not None
    (part,) = prepared.sources
    assert part.manifest is not None
    assert dropped_from(part.path)[0] == {"not JSON": 1, "empty": 1}
    assert sum(record.n_documents for record in part.manifest.files()) == len(GOOD)
    told, first = dropped_lines(prepared)
    assert told == f"{part.path}: 11 documents, 9 kept; left out: 1 empty, 1 not JSON"
    assert "a.jsonl: line 5 (from byte 76 on) is not JSON" in first
