"""Documents of every kind of file, and each damage told by file and place, in bounded time and memory."""

import gzip
import json
import resource
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from data import columns, lines
from data.config import ChatConfig, SourceConfig
from data.documents import check_text, read_documents
from data.errors import DataError
from data.rules import check_data
from data.shards import Slice, plan_shards
from data.sources import ENDINGS, input_files, reads_files

TEXTS = ["first", "second é", None, "third", ""]
KEPT = ["first", "second é", "third"]


def read(path: Path | str, shard_bytes: int = 10**6, **fields) -> list[str]:
    """All documents of a source, by the way that preparation takes."""
    source = SourceConfig(path=str(path), **fields)
    files = input_files(source, "data.sources[0]")
    check_text(files, "data.sources[0]")
    shards = plan_shards(source, files, shard_bytes, "data.sources[0]")
    return [text for shard in shards for text, _ in read_documents(source, shard, "data.sources[0]") if text]


def refused(path: Path | str, **options) -> str:
    """The one line with which a source is refused."""
    with pytest.raises(DataError) as caught:
        read(path, **options)
    (line,) = str(caught.value).splitlines()
    assert "; " in line
    return line


def table() -> pyarrow.Table:
    return pyarrow.table({"n": list(range(len(TEXTS))), "text": pyarrow.array(TEXTS, pyarrow.string())})


def write_arrow(path: Path, stream: bool, kind: pyarrow.DataType | None = None) -> None:
    whole = table() if kind is None else table().set_column(1, "text", table()["text"].cast(kind))
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(str(path), whole.schema) as writer:
        writer.write_table(whole, max_chunksize=2)


ARROWS = {
    "stream": lambda path: write_arrow(path, stream=True),
    "file": lambda path: write_arrow(path, stream=False),
    "large strings": lambda path: write_arrow(path, stream=True, kind=pyarrow.large_string()),
    "dictionary": lambda path: write_arrow(
        path, stream=False, kind=pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    ),
}


@pytest.mark.parametrize("name", ARROWS)
def test_arrow_files_are_read(tmp_path: Path, name: str) -> None:
    ARROWS[name](tmp_path / "a.arrow")
    assert read(tmp_path / "a.arrow") == KEPT


def test_saved_datasets_are_read_in_their_own_order(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """What Dataset.save_to_disk and DatasetDict.save_to_disk write, though their names say nothing of Arrow."""
    datasets.disable_progress_bars()
    dataset = datasets.Dataset.from_dict({"text": [f"document {i}" for i in range(30)]})
    dataset.save_to_disk(tmp_path / "one", num_shards=12)
    datasets.DatasetDict(train=dataset, test=dataset.select([7, 3])).save_to_disk(tmp_path / "two")
    assert read(f"hf://{tmp_path}/one") == dataset["text"][:]
    assert read(f"hf://{tmp_path}/two", split="test") == ["document 7", "document 3"]
    assert "has no such split, only train, test; set split" in refused(f"hf://{tmp_path}/two", split="dev")
    state = tmp_path / "one" / "state.json"
    for name in ("../two/train/data-00000-of-00001.arrow", "/etc/passwd", "..", "", None, {"filename": 3}):
        state.write_text(json.dumps({"_data_files": [{"filename": name}]}))
        assert "which is no file of its folder; save it again" in refused(f"hf://{tmp_path}/one")
    for text in ("[" * 10**5, "nonsense", "[]", "{}", '{"_data_files": {}}'):
        state.write_text(text)
        assert str(state) in refused(f"hf://{tmp_path}/one")
    state.write_text(json.dumps({"_data_files": [{"filename": "gone.arrow"}]}))
    assert "gone.arrow cannot be read (No such file" in refused(f"hf://{tmp_path}/one")


def test_a_saved_dataset_is_checked_as_files_are(tmp_path: Path) -> None:
    from data.config import DataConfig

    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "d")
    source = SourceConfig(path=f"hf://{tmp_path}/d")
    assert reads_files(source)
    config = DataConfig(sources=(source,), tokenizer=str(tmp_path), token_dir=str(tmp_path / "t"))
    assert check_data(config, 300) == []
    (tmp_path / "d/state.json").write_text("{")
    assert len(check_data(config, 300)) == 1


def jsonl(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


GOOD_LINES = jsonl(*({"text": f"document {i}"} for i in range(3)))
BROKEN: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "nested": ("a.jsonl", lambda: GOOD_LINES + b"[" * 200_000 + b"\n", "line 4 (from byte 69 on) is nested too deeply"),
    "nested values": ("a.jsonl", lambda: b'{"text":' * 90_000, "line 1 (from byte 0 on) is nested too deeply"),
    "long number": (
        "a.jsonl",
        lambda: GOOD_LINES + b'{"n": ' + b"9" * 10**6 + b"}\n",
        "line 4 (from byte 69 on) is not",
    ),
    "Latin-1": ("a.jsonl", lambda: GOOD_LINES + '{"text": "é"}\n'.encode("latin-1"), "is not UTF-8: byte 79 is 0xe9"),
    "surrogate bytes": (
        "a.jsonl",
        lambda: b'{"text": "\xed\xa0\x80"}',
        "line 1 (from byte 0 on) is not UTF-8: byte 10",
    ),
    "gz line": ("a.jsonl.gz", lambda: gzip.compress(GOOD_LINES + b"{}x\n"), "line 4 (from byte 69 on) is not JSON"),
    "torn gz": ("a.jsonl.gz", lambda: gzip.compress(GOOD_LINES * 99)[:-9], "cannot be read (Compressed file ended"),
    "torn zst": (
        "a.jsonl.zst",
        lambda: zstandard.compress(GOOD_LINES * 99)[:-3],
        "in the middle of a compressed frame",
    ),
    "torn header": ("a.jsonl.zst", lambda: zstandard.compress(GOOD_LINES)[:6], "in the middle of a compressed frame"),
    "junk after": ("a.jsonl.zst", lambda: zstandard.compress(GOOD_LINES) + b"junk", "cannot be read (zstd"),
    "arrow": ("a.arrow", lambda: b"nonsense", "cannot be read as Arrow"),
    "empty arrow": ("a.arrow", lambda: b"ARROW1\0\0", "cannot be read as Arrow"),
    "text": ("a.txt", lambda: "caf\xe9".encode("latin-1"), "is not UTF-8: byte 3 is 0xe9"),
    "text later": ("a.txt", lambda: b"x" * 70_000 + b"\xff", "a.txt is not UTF-8: byte 70000 is 0xff"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_told_by_file_and_place(tmp_path: Path, name: str) -> None:
    file, make, expected = BROKEN[name]
    (tmp_path / file).write_bytes(make())
    line = refused(tmp_path / file)
    assert str(tmp_path / file) in line
    assert expected in line


def test_places_count_from_the_files_start_whatever_the_slices(tmp_path: Path) -> None:
    data = GOOD_LINES * 20
    (tmp_path / "a.jsonl").write_bytes(data + b"nonsense\n" + data)
    assert f"line 61 (from byte {len(data)} on) is not JSON" in refused(tmp_path / "a.jsonl", shard_bytes=100)
    text = "line of text\n" * 20
    (tmp_path / "a.txt").write_bytes(text.encode() * 400 + b"\xe9\n")
    assert f"byte {len(text) * 400} is 0xe9" in refused(tmp_path / "a.txt", shard_bytes=1000)


def test_other_encodings_are_found_before_anything_is_read(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes("naïve".encode("latin-1" if number % 2 else "utf-8"))
    (tmp_path / "end.txt").write_bytes(b"x" * ((1 << 16) - 1) + "é".encode())
    line = refused(tmp_path)
    assert "1.txt (one of 2 such files of data.sources[0]) is not UTF-8: byte 2 is 0xef" in line
    assert "leave them out with exclude: ['**/1.txt', '**/3.txt']" in line
    assert len(read(tmp_path, exclude=("**/[13].txt",))) == 4  # a character across the end of what is looked at is one


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_lines_without_end_take_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of 200 times what a line may have: a sparse file, and bombs of a few kB."""
    monkeypatch.setattr(lines, "LONGEST_LINE", 1_000_000)
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(200_000_000)
    bomb = b"\0" * 200_000_000
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(bomb, 1))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(bomb))
    del bomb
    before = peak_mib()
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst"):
        assert "the line from byte 0 on is longer than 1000000 bytes" in refused(tmp_path / name, shard_bytes=10**9)
    assert peak_mib() - before < 50


@pytest.mark.parametrize("end", ["gz", "zst"])
def test_bombs_of_short_lines_end_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setattr(lines, "FREE_BYTES", 1 << 20)
    text = b" " * 1000 + b"\n"
    compress = gzip.compress if end == "gz" else zstandard.compress
    (tmp_path / f"a.jsonl.{end}").write_bytes(compress(text * 20_000))
    assert "unpacks to more than 200 times its size" in refused(tmp_path / f"a.jsonl.{end}")


def test_a_line_across_many_slices_is_refused_without_reading_it_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LONGEST_LINE", 1000)
    monkeypatch.setattr(lines, "BLOCK", 100)
    (tmp_path / "a.jsonl").write_bytes(b"x" * 50_000)
    source = SourceConfig(path=str(tmp_path / "a.jsonl"))
    shards = plan_shards(source, input_files(source, "k"), 500, "k")
    with pytest.raises(DataError, match="the line around byte 24500 is longer than 1000 bytes"):
        list(read_documents(source, shards[49], "k"))


def test_parquet_columns_and_footers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    kinds = {
        "int64": pyarrow.array([1]),
        "list<element: string>": pyarrow.array([["a"]]),
        "struct<text: string>": pyarrow.array([{"text": "a"}]),
        "binary": pyarrow.array([b"a"]),
    }
    for kind, array in kinds.items():
        pyarrow.parquet.write_table(pyarrow.table({"text": array}), path)
        assert f"data.sources[0].text_key='text' must hold text but holds {kind} in {path}" in refused(path)
    invalid = pyarrow.array([b"a", b"b", b"\xff"] * 50).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": invalid}), path, row_group_size=2)
    assert f"{path}: row 2 is not UTF-8" in refused(path)
    pyarrow.parquet.write_table(table(), path, row_group_size=2)
    assert read(path) == KEPT
    good = path.read_bytes()
    for damaged in (good[:-8] + b"\xff" * 4 + good[-4:], good[:-20] + good[-8:], good[: len(good) // 2], b"PAR1" * 4):
        path.write_bytes(damaged)
        assert str(path) in refused(path)
    monkeypatch.setattr("data.shards.MOST_BYTES", 10)
    path.write_bytes(good)
    assert "claims to hold" in refused(path)


def test_files_of_a_kind_that_nothing_reads_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENDINGS, "csv", "csv")
    (tmp_path / "a.csv").write_text("text\n")
    source = SourceConfig(path=str(tmp_path))
    with pytest.raises(AssertionError, match="csv"):
        plan_shards(source, input_files(source, "data.sources[0]"), 100, "data.sources[0]")
    with pytest.raises(AssertionError, match="csv"):
        list(read_documents(source, (Slice("a.csv", "csv", 0, 5, 5),), "data.sources[0]"))  # type: ignore[arg-type]


def test_a_column_whose_name_holds_a_dot_is_no_field(tmp_path: Path) -> None:
    fields = pyarrow.array([{"text": "a field"}] * len(TEXTS))
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"m": fields, "m.text": pyarrow.array(TEXTS, pyarrow.string())}), path)
    assert read(path, text_key="m.text") == KEPT
    chats = pyarrow.array([[{"role": "assistant", "content": text or ""}] for text in TEXTS])
    pyarrow.parquet.write_table(pyarrow.table({"m": fields, "m.text": chats}), path)
    found = read(path, chat=ChatConfig(messages_key="m.text"))
    assert [json.loads(chat)["messages"][0]["content"] for chat in found] == [text or "" for text in TEXTS]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_without_chats_are_named(tmp_path: Path, form: str) -> None:
    whole = pyarrow.table({"conversations": [["a"]], "prompt": ["b"]})
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(whole, path)
    else:
        with pyarrow.ipc.new_file(str(path), whole.schema) as writer:
            writer.write_table(whole)
    with pytest.raises(DataError, match=r"are not in a record of .*, which holds conversations, prompt; set them to"):
        read(path, chat=ChatConfig())


def test_a_parquet_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value stored once and meant a million times."""
    monkeypatch.setattr(lines, "FREE_BYTES", 1 << 20)
    monkeypatch.setattr(columns, "ROWS_AT_ONCE", 8)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 10_000] * 5000}), tmp_path / "a.parquet")
    assert "unpacks to more than 200 times its size" in refused(tmp_path / "a.parquet")


def test_arrow_files_that_lie_about_their_contents_are_refused_and_not_followed(tmp_path: Path) -> None:
    """Every single byte of a file changed in turn: read as it is, or refused; reading outside it would be a crash."""
    write_arrow(tmp_path / "a.arrow", stream=True)
    good = (tmp_path / "a.arrow").read_bytes()
    outcomes = {True: 0, False: 0}
    for at in range(0, len(good), 3):
        (tmp_path / "a.arrow").write_bytes(good[:at] + bytes([good[at] ^ 0x80]) + good[at + 1 :])
        try:
            read(tmp_path / "a.arrow")
            outcomes[True] += 1
        except DataError:
            outcomes[False] += 1
    assert min(outcomes.values()) > 10
