"""A check, on the first documents of each source, that decoding their tokens gives back the original text."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from data.chat import said
from data.config import DataConfig, SourceConfig
from data.documents import read_documents
from data.errors import DataError
from data.shards import plan_shards
from data.sources import input_files, reads_files
from data.tokenizer import load_fast, making_tokens

MOST_DOCUMENTS = 64  # of a source
MOST_CHARACTERS = 1 << 14  # of a document: a tokenizer that loses anything does so early
SHOWN = 8  # characters of a difference that are shown


@dataclass(frozen=True)
class RoundTrip:
    """The result of tokenizing a source's first documents and decoding them again."""

    n_documents: int
    n_changed: int
    first: str = ""  # the first document that changed, and its first difference


def round_trip(config: DataConfig, source: SourceConfig, tokenizer: Path) -> RoundTrip | None:
    """Tokenizes a source's first documents and decodes them again; None where its corpus is no longer here."""
    try:
        documents = list(_first_documents(config, source))
    except DataError:
        return None
    fast, changed, first = load_fast(tokenizer), 0, ""
    for number, text in enumerate(documents):
        # one at a time: the library's threads would make a later fork of this process unsafe
        try:
            with making_tokens(f"document {number}"):
                ids = fast.encode(text, add_special_tokens=False).ids
        except DataError:  # documents are cut here, within words; whole ones were tokenized before
            continue
        back = fast.decode(ids, skip_special_tokens=False)
        if back != text:
            changed += 1
            first = first or f"document {number}, {_difference(text, back)}"
    return RoundTrip(len(documents), changed, first)


def _first_documents(config: DataConfig, source: SourceConfig) -> Iterator[str]:
    files = input_files(source, "data.sources") if reads_files(source) else []
    shards = plan_shards(source, files, config.shard_bytes, "data.sources")
    documents = (text for shard in shards for text, _ in read_documents(source, shard, "data.sources") if text)
    for text in islice(documents, MOST_DOCUMENTS):
        whole = text if source.chat is None else said(text)
        yield whole[:MOST_CHARACTERS].encode(errors="replace").decode()


def _difference(text: str, back: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
    return f"character {at}: {text[at : at + SHOWN]!r} comes back as {back[at : at + SHOWN]!r}"
