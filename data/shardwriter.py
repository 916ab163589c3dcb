"""Tokenizing one shard: the work of one worker process of ``prepare``."""

import errno
import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.chat_tokens import tokenize_chats
from data.documents import read_documents
from data.errors import refuse
from data.manifest import FileRecord, as_tree, write_json
from data.shardtask import Report, ShardTask, StoppedError, hash_text
from data.tally import Tally
from data.tokenfile import token_dtype
from data.tokenizer import load_fast, making_tokens, read_info
from data.tokenwriter import TokenFileWriter

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_CHARACTERS = 1 << 20  # tokenized at once
PIECE_CHARACTERS = 1 << 18  # a longer document is tokenized in pieces (_cut)
CUT_CHARACTERS = 1 << 14  # a good place to cut is searched this far back: text of whitespace alone has none
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
HASH_RANGE = 1 << 64


@dataclass(frozen=True)
class ShardRecord:
    """The record of a finished shard. A shard counts as finished once its record is on disk."""

    number: int
    n_documents: int
    smallest: tuple[int, int] | None  # the document with the smallest hash: (hash, number in the shard)
    largest: tuple[int, int] | None  # likewise the one with the largest hash
    train: FileRecord | None  # None: no document of the shard is in this split, and there is no file
    heldout: FileRecord | None
    forced: tuple[int, str] | None  # (document, split) that was assigned whatever its hash
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> documents left out
    bad: list[str] = field(default_factory=list)  # the first of those that could not be read

    @property
    def files(self) -> list[FileRecord]:
        """The token files of the shard."""
        return [file for file in (self.train, self.heldout) if file is not None]


def write_shard(task: ShardTask, report: Report, stopped: Callable[[], bool]) -> ShardRecord:
    """Writes the shard's token files, then its record, which it returns.

    The hash of a document's text decides whether it is held out, so all copies of a document are in the same split.
    Raises DataError where the input is wrong, OSError where the disk is full, and StoppedError where ``stopped()`` is
    true; no unfinished file is left behind.
    """
    hashes: list[int] = []
    writers: dict[str, TokenFileWriter] = {}
    dtype, tally = token_dtype(read_info(task.tokenizer).n_ids), Tally(task.source.max_bad_share)
    try:
        tokenized = _tokenize if task.source.chat is None else tokenize_chats
        for digest, ids, is_target in tokenized(task, report, stopped, tally):
            split = _split_of(digest, len(hashes), task)
            hashes.append(digest)
            if split not in writers:
                prefix = task.folder / f"{split}-{task.number:05}"
                writers[split] = TokenFileWriter(prefix, dtype, has_mask=is_target is not None)
            writers[split].add(ids, is_target)
        files = {split: writer.finish() for split, writer in writers.items()}
        record = _make_record(task, hashes, files, tally)
        write_json(_record_path(task.folder, task.number), as_tree(record))
    finally:
        for writer in writers.values():
            writer.abort()
    return record


def read_record(folder: Path, number: int) -> ShardRecord | None:
    """The record of a finished shard; None where the shard is unfinished, or its files have other sizes."""
    try:
        tree = json.loads(_record_path(folder, number).read_text())
        for split in ("train", "heldout"):
            tree[split] = tree[split] and FileRecord(**tree[split])
        for name in ("smallest", "largest", "forced"):
            tree[name] = tree[name] and tuple(tree[name])
        record = ShardRecord(**tree)
        for file in record.files:
            if any(path.stat().st_size != n_bytes for path, n_bytes, _ in file.halves(folder)):
                return None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    return record


def dropped_from(folder: Path) -> tuple[dict[str, int], list[str]]:
    """(documents left out by reason, lines about the first unreadable ones) over a prepared source's shards."""
    counts: dict[str, int] = {}
    bad: list[str] = []
    for path in sorted(folder.glob("shard-*.json")):
        record = read_record(folder, int(path.stem.partition("-")[2]))
        for reason, count in (record.dropped if record is not None else {}).items():
            counts[reason] = counts.get(reason, 0) + count
        bad += record.bad if record is not None else []
    return counts, bad


def no_room(token_dir: Path, error: OSError) -> Exception:
    """The DataError for a full disk, or a limit on files' sizes; any other OSError comes back unchanged."""
    if error.errno not in NO_ROOM:
        return error
    more = "raise the limit (ulimit -f)" if error.errno == errno.EFBIG else "free some"
    remedy = f"{more}, or set data.token_dir to another disk; finished shards are kept"
    return refuse(f"data.token_dir={str(token_dir)!r}", f"has no room left ({error.strerror})", remedy)


def _split_of(digest: int, document: int, task: ShardTask) -> str:
    if task.forced is not None and task.forced[0] == document:
        return task.forced[1]
    return "heldout" if digest < task.heldout_fraction * HASH_RANGE else "train"


def _make_record(task: ShardTask, hashes: list[int], files: dict[str, FileRecord], tally: Tally) -> ShardRecord:
    assert tally.n_documents == len(hashes) + sum(tally.dropped.values()), "each document is kept or dropped"
    numbered = [(digest, number) for number, digest in enumerate(hashes)]
    return ShardRecord(
        number=task.number,
        n_documents=len(hashes),
        smallest=min(numbered, default=None),
        largest=max(numbered, default=None),
        train=files.get("train"),
        heldout=files.get("heldout"),
        forced=task.forced,
        dropped=tally.dropped,
        bad=tally.named,
    )


def _record_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05}.json"


def _tokenize(
    task: ShardTask, report: Report, stopped: Callable[[], bool], tally: Tally
) -> Iterator[tuple[int, np.ndarray, None]]:
    """(hash, token ids with BOS and end of text, None: all are targets) of each document, in order."""
    tokenizer, eos = load_fast(task.tokenizer), read_info(task.tokenizer).eos_id
    begin = [] if task.bos_id is None else [np.array([task.bos_id], np.int64)]
    parts: list[np.ndarray] = [*begin]
    for batch, n_bytes in _batches(task, tally):
        if stopped():
            raise StoppedError
        n_documents = n_tokens = 0
        for (digest, _), ids in zip(batch, _encode(tokenizer, batch, task), strict=True):
            parts.append(ids)
            if digest is not None:
                parts.append(np.array([eos], np.int64))
                whole = np.concatenate(parts)
                parts = [*begin]
                n_documents, n_tokens = n_documents + 1, n_tokens + len(whole)
                yield digest, whole, None
        report(n_bytes, n_documents, n_tokens)


def _encode(tokenizer: "Tokenizer", batch: list[tuple[int | None, str]], task: ShardTask) -> Iterator[np.ndarray]:
    with making_tokens(task.name_of_text):
        encodings = tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
    # This takes a third of the time of np.array(ids): 7 ns a token instead of 21, where tokenizing takes some 1200.
    return (np.frombuffer(array("I", encoding.ids), np.uint32) for encoding in encodings)


def _batches(task: ShardTask, tally: Tally) -> Iterator[tuple[list[tuple[int | None, str]], float]]:
    """(batch, bytes of input that it stands for), where a batch is a list of (hash, piece of a document).

    The hash comes with a document's last piece; for the others it is None.
    """
    batch: list[tuple[int | None, str]] = []
    n_characters, n_bytes = 0, 0.0
    for text, done in read_documents(task.source, task.shard, task.key, tally):
        n_bytes += done
        digest, text = hash_text(text)
        for piece, is_last in _pieces(text):
            batch.append((digest if is_last else None, piece))
            n_characters += len(piece)
            if n_characters >= BATCH_CHARACTERS:
                yield batch, n_bytes
                batch, n_characters, n_bytes = [], 0, 0.0
    yield batch, n_bytes


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """(piece, whether it is the last) of a text; nothing for an empty text."""
    start = 0
    while start < len(text):
        stop = start + PIECE_CHARACTERS
        if stop < len(text):
            stop = _cut(text, start, stop)
        yield text[start:stop], stop >= len(text)
        start = stop


def _cut(text: str, start: int, stop: int) -> int:
    """The end of a piece of ``text[start:stop]``: after the last line end between two visible characters.

    Tokenizers that split at whitespace split there too, so the tokens of both sides are those of the whole. Without
    such a line end it is before the last space between visible characters (where they split); without that, after
    the last line end, or ``stop``.
    """
    first = max(start + 1, stop - CUT_CHARACTERS)
    for mark, goes_with in (("\n", 1), (" ", 0)):
        place = text.rfind(mark, first, stop)
        while place > 0 and (text[place - 1].isspace() or text[place + 1].isspace()):
            place = text.rfind(mark, first, place)
        if place > 0:
            return place + goes_with
    return text.rfind("\n", start, stop) + 1 or stop
