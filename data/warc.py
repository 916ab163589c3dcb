"""Reading documents from WARC files: the text of Common Crawl's WET files, and other records of plain text.

HTML is not converted into text: fetched pages are left out and counted. ``warcio`` reads the files.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from data.errors import DataError, reason_of, refuse
from data.lines import LONGEST_LINE, MEND, Expansion
from data.shards import Slice
from data.tally import NOT_TEXT, Tally

if TYPE_CHECKING:
    from warcio.recordloader import ArcWarcRecord

TEXT_RECORDS = ("conversion", "resource", "response")  # other kinds describe how pages were fetched


def read_warc(piece: Slice, tally: Tally) -> Iterator[tuple[str | None, float]]:
    """(text, fraction of the file read so far) of each record with plain text; the text is None where it is bad.

    Other records are counted in ``tally``. Raises DataError where the file is damaged or truncated, or has only records
    without plain text.
    """
    iterate = _iterator()
    limit, n_characters, n_texts, n_other = Expansion(piece.path, piece.file_bytes), 0, 0, 0
    with open(piece.path, "rb") as file:
        records = iterate(file)
        for record in _records(records, piece):
            if record.rec_type not in TEXT_RECORDS:
                continue
            done = min(1.0, records.offset / max(1, piece.file_bytes))
            if not _is_plain(record):
                n_other += 1
                tally.n_documents += 1
                tally.drop(NOT_TEXT)
                continue
            text = _text_of(record, piece, tally)
            n_texts, n_characters = n_texts + 1, n_characters + len(text or "")
            limit.check(n_characters)
            yield text, done
    if n_other and not n_texts:
        remedy = "give WET files, or extract its text first, or leave it out with exclude"
        raise refuse(piece.path, f"holds no plain text in its {n_other} records, only {NOT_TEXT}", remedy)


def _iterator() -> Any:
    try:
        from warcio.archiveiterator import ArchiveIterator
    except ImportError:
        raise refuse("warcio", "reads WARC files, and is not installed", "pip install roundtable[warc]") from None
    return ArchiveIterator


def _records(records: Any, piece: Slice) -> "Iterator[ArcWarcRecord]":
    """The file's records, in order. Raises DataError where the file is not a valid WARC file."""
    while True:
        try:
            record = next(records, None)
        except Exception as error:  # the library's own kinds, and what a broken header makes it raise
            raise refuse(piece.path, f"cannot be read as WARC ({reason_of(error)})", MEND) from error
        if record is None:
            return
        yield record


def _is_plain(record: "ArcWarcRecord") -> bool:
    headers = record.http_headers if record.http_headers is not None else record.rec_headers
    kind = headers.get_header("Content-Type") or ("text/plain" if record.rec_type == "conversion" else "")
    return kind.partition(";")[0].strip().lower() == "text/plain"


def _text_of(record: "ArcWarcRecord", piece: Slice, tally: Tally) -> str | None:
    name = record.rec_headers.get_header("WARC-Target-URI") or record.rec_headers.get_header("WARC-Record-ID")
    try:
        content = record.content_stream().read(LONGEST_LINE + 1)
    except Exception as error:  # zlib's, or the library's
        raise refuse(piece.path, f"cannot be read as WARC ({reason_of(error)})", MEND) from error
    if record.http_headers is None and len(content) <= LONGEST_LINE:
        needed = int(record.rec_headers.get_header("Content-Length") or 0)
        if len(content) < needed:
            rule = f"ends in the middle of a record: {len(content)} of its {needed} bytes are there"
            raise refuse(piece.path, rule, MEND)
    if len(content) > LONGEST_LINE:
        tally.bad("too long", lambda: _bad(piece, name, f"is longer than {LONGEST_LINE} bytes"))
        return None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 ({reason_of(error)})"
        tally.bad("not UTF-8", lambda: _bad(piece, name, why))
        return None


def _bad(piece: Slice, name: str | None, why: str) -> DataError:
    return refuse(f"{piece.path}: the record of {name}", why, MEND)
