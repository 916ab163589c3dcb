"""Cleaned shards on disk: the record of each shard, its texts, and which of them are copies.

TOKEN_DIR/cleaned-STEM-HASH/
settings.json                     the stages, the sources and the versions of libraries
inputs.json                       the corpus's files and sizes, and the evaluation sets'
evaluations/                      the n-grams of the evaluation sets
text/00000.jsonl.zst              the texts that a shard's stages kept, a JSON string a line
hashes/00000.npy                  their hashes, for exact copies
bucket_000/00000.minhash.sig ...  their signatures, in datatrove's layout, for near-duplicates
shard-00000.json                  counts and samples; its presence makes the shard finished
pairs/                            pairs of copies, by hash and by bucket
removed/00000.npy                 which texts of the shard are copies
duplicates.json                   written last, where a stage looks over all sources: the folder is complete
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zstandard

from data.errors import refuse

EXACT, NEAR = "exact_duplicate", "near_duplicate"
REASONS = {1: EXACT, 2: NEAR}  # the numbers of the reasons in the files of removed/
DUPLICATES = "duplicates.json"
SETTINGS = "settings.json"


@dataclass(frozen=True)
class Sample:
    """A document that a stage dropped or changed."""

    document: int  # its number among those of the shard
    text: str  # its beginning
    beside: str = ""  # the beginning of what it became, or of the copy that is kept


@dataclass(frozen=True)
class CleanedShard:
    """Counts of one shard's documents after the stages and before deduplication: read, kept, dropped and changed."""

    number: int  # the shard's among those of all sources that are cleaned together
    source: int  # the place of its source in data.sources
    n_documents: int
    n_kept: int
    dropped: dict[str, int]  # reason -> documents
    changed: dict[str, int]  # stage -> kept documents whose text it changed
    bad: list[str]  # lines about the first documents that could not be read
    n_bytes: int  # bytes of input
    kept_bytes: int  # bytes of UTF-8 in the kept texts
    text_xxh3: str  # hash of the file of texts
    samples: dict[str, list[Sample]] = field(default_factory=dict)  # reason or stage -> its first documents


def record_path(folder: Path, number: int) -> Path:
    """The path of shard ``number``'s record."""
    return folder / f"shard-{number:05}.json"


def text_path(folder: Path, number: int) -> Path:
    """The path of shard ``number``'s kept texts."""
    return folder / f"text/{number:05}.jsonl.zst"


def read_cleaned(folder: Path, number: int) -> CleanedShard | None:
    """The shard's record; None where the shard is not finished, or its record is damaged."""
    try:
        tree = json.loads(record_path(folder, number).read_text())
        samples = {key: [Sample(**each) for each in found] for key, found in tree.pop("samples").items()}
        return CleanedShard(**tree, samples=samples)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def read_removed(folder: Path, number: int) -> np.ndarray:
    """The copies in a shard, uint32 (copies, 2), ascending: the text's place in the shard, and the reason's number."""
    try:
        return np.load(folder / f"removed/{number:05}.npy")
    except FileNotFoundError:
        return np.zeros((0, 2), np.uint32)


def read_lines(path: Path) -> Iterator[str]:
    """All texts of a cleaned shard, including copies. Raises DataError where the file is damaged."""
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as stream:
            rest = b""
            while block := stream.read(1 << 20):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    yield json.loads(line)
    except (OSError, ValueError, zstandard.ZstdError) as error:
        remedy = f"remove {path.parent.parent} and prepare again"
        raise refuse(str(path), f"is damaged ({error})", remedy) from error


def read_kept(path: Path) -> Iterator[str]:
    """The texts of a cleaned shard without copies, in the order of the input."""
    number, folder = int(path.name.partition(".")[0]), path.parent.parent
    removed = set(read_removed(folder, number)[:, 0].tolist())
    for place, text in enumerate(read_lines(path)):
        if place not in removed:
            yield text


def counts_of(path: Path) -> tuple[int, dict[str, int], list[str]]:
    """(documents read, documents dropped by reason, lines about the first unreadable ones) of a shard.

    ``path`` is its file of texts. Copies count as dropped. Raises DataError where the record is missing or damaged.
    """
    number, folder = int(path.name.partition(".")[0]), path.parent.parent
    record = read_cleaned(folder, number)
    if record is None:
        raise refuse(str(record_path(folder, number)), "is missing or damaged", f"remove {folder} and prepare again")
    dropped = dict(record.dropped)
    for reason, count in zip(*np.unique(read_removed(folder, number)[:, 1], return_counts=True), strict=True):
        dropped[REASONS[int(reason)]] = int(count)
    return record.n_documents, dropped, record.bad
