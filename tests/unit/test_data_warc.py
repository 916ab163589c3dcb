"""WARC files and Arrow's: what is a document, what is counted, what is refused."""

import gzip
import json
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pytest
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from data.config import SourceConfig
from data.documents import read_documents
from data.errors import DataError
from data.shards import plan_shards
from data.sources import input_files
from data.tally import NOT_TEXT, Tally
from launcher.cli import main


def write_warc(path: Path, records: list[tuple[str, str, bytes]]) -> Path:
    """Records of (type, content type, payload), after the header that such files begin with."""
    with path.open("wb") as out:
        writer = WARCWriter(out, gzip=path.suffix == ".gz")
        writer.write_record(writer.create_warcinfo_record(path.name, {"software": "a test"}))
        for number, (kind, content_type, payload) in enumerate(records):
            http = None
            if kind == "response":
                http = StatusAndHeaders("200 OK", [("Content-Type", content_type)], protocol="HTTP/1.1")
            options = {"http_headers": http} if http else {"warc_content_type": content_type}
            url = f"http://example.org/{number}"
            writer.write_record(writer.create_warc_record(url, kind, payload=BytesIO(payload), **options))
    return path


def read(path: Path, **options) -> tuple[list[str], Tally]:
    source = SourceConfig(path=str(path), **options)
    (shard,) = plan_shards(source, input_files(source, "key"), 1 << 30, "key")
    tally = Tally(source.max_bad_share)
    found = list(read_documents(source, shard, "key", tally))
    assert sum(done for _, done in found) == pytest.approx(sum(piece.n_bytes for piece in shard))
    return [text for text, _ in found if text], tally


# the library's writer leaves its buffer to the collector
pytestmark = pytest.mark.filterwarnings("ignore:Unclosed file <tempfile:ResourceWarning")

TEXTS = ["a page's text\nof two lines", "ünïcödé", "x" * 70_000]
WET = [("conversion", "text/plain", text.encode()) for text in TEXTS]


@pytest.mark.parametrize("name", ["a.wet", "a.warc.wet.gz", "a.warc", "a.WARC.gz"])
def test_the_texts_of_a_crawl_are_documents(tmp_path: Path, name: str) -> None:
    texts, tally = read(write_warc(tmp_path / name, WET))
    assert (texts, tally.n_documents, tally.dropped) == (TEXTS, 3, {})


def test_pages_are_counted_and_left_out(tmp_path: Path) -> None:
    records = [
        ("request", "application/http", b"GET / HTTP/1.1\r\n\r\n"),
        ("response", "text/html; charset=utf-8", b"<p>a</p>"),
        ("response", "text/plain; charset=utf-8", b"plain"),
        ("metadata", "application/warc-fields", b"a: b"),
        ("resource", "text/plain", b"a resource"),
        ("conversion", "text/plain", b""),
    ]
    texts, tally = read(write_warc(tmp_path / "a.warc.gz", records))
    assert texts == ["plain", "a resource"]
    assert (tally.n_documents, tally.dropped) == (4, {NOT_TEXT: 1, "empty": 1})


def test_bad_records_are_counted_within_the_share(tmp_path: Path) -> None:
    path = write_warc(tmp_path / "a.wet", [*WET, ("conversion", "text/plain", "Zürich".encode("latin-1"))])
    with pytest.raises(DataError, match=r"a.wet: the record of http://example.org/3 is not UTF-8"):
        read(path)
    texts, tally = read(path, max_bad_share=0.3)
    assert (texts, tally.dropped) == (TEXTS, {"not UTF-8": 1})


@pytest.mark.parametrize("name", ["a.wet", "a.wet.gz"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_file_that_ends_early_is_refused(tmp_path: Path, name: str, share: float) -> None:
    random = np.random.default_rng(0)
    records = [("conversion", "text/plain", random.bytes(9000).hex().encode()) for _ in range(5)]
    path = write_warc(tmp_path / name, records)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"a.wet"):
        read(path, max_bad_share=0.5)


def test_what_is_none_or_holds_no_text_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command; nothing is created."""
    page = write_warc(tmp_path / "page.warc.gz", [("response", "text/html", b"<p>a</p>")])
    (tmp_path / "no.warc").write_bytes(b"no such thing\n" * 9)
    (tmp_path / "bad.wet.gz").write_bytes(gzip.compress(b"no such thing\n" * 9))
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(40) + b"FEA1")
    write_warc(tmp_path / "chat.wet", WET)
    lines = {
        page.name: "page.warc.gz holds no plain text in its 1 records, only HTML or other content",
        "no.warc": "no.warc cannot be read as WARC (",
        "bad.wet.gz": "bad.wet.gz cannot be read as WARC (",
        "old.feather": "old.feather cannot be read as Arrow (",
    }
    for name, line in lines.items():
        assert_refused(tmp_path, capsys, {"path": str(tmp_path / name)}, line)
    chat = {"path": str(tmp_path / "chat.wet"), "chat": {}}
    assert_refused(tmp_path, capsys, chat, "data.sources[0].chat needs records, and ")


def assert_refused(folder: Path, capsys: pytest.CaptureFixture[str], source: dict, line: str) -> None:
    config = folder / "run.yaml"
    config.write_text(json.dumps({"data": {"sources": [source], "token_dir": str(folder / "tokens")}}))
    assert main(["prepare", str(config)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert line in told and not (folder / "tokens").exists()


@pytest.mark.parametrize("name", ["a.feather", "a.ipc", "a.arrow"])
@pytest.mark.parametrize("compression", ["uncompressed", "zstd", "lz4"])
def test_arrow_is_read_whatever_it_is_called(tmp_path: Path, name: str, compression: str) -> None:
    table = pa.table({"id": range(3), "text": TEXTS})
    pa.feather.write_feather(table, str(tmp_path / name), compression=compression)
    assert read(tmp_path / name)[0] == TEXTS
    with pa.OSFile(str(tmp_path / name), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    assert read(tmp_path / name)[0] == TEXTS
