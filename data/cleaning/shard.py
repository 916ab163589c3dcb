"""Cleaning one shard, in one worker process: it is read once; texts, hashes, signatures and a record are written."""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash
import zstandard

from data.cleaning.config import CleaningConfig
from data.cleaning.judge import Judge, Verdict
from data.cleaning.kept import CleanedShard, Sample, record_path, text_path
from data.cleaning.near import Signatures
from data.config import SourceConfig
from data.documents import read_documents
from data.manifest import hash_file, write_json
from data.partial import move_into_place, partial_suffix
from data.shards import Shard
from data.shardtask import Report, StoppedError
from data.tally import Tally

SAMPLES = 3  # samples kept for each reason in a shard
EXCERPT = 400  # characters of a sample
EVALUATIONS = "evaluations"
LEVEL = 3  # zstandard's level of compression
REPORTED = 1 << 20  # characters between two reports


@dataclass(frozen=True)
class CleanTask:
    """Everything that a process needs to clean one shard."""

    folder: Path
    number: int  # the shard's among those of all sources that are cleaned together
    source_number: int
    shard: Shard
    source: SourceConfig
    key: str  # the source's name in errors
    cleaning: CleaningConfig


@dataclass
class _Counts:
    n_kept: int = 0
    kept_bytes: int = 0
    changed: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def show(self, name: str, sample: Sample) -> None:
        """Keeps the sample if it is among the first SAMPLES with this name."""
        found = self.samples.setdefault(name, [])
        if len(found) < SAMPLES:
            found.append(sample)


def clean_shard(task: CleanTask, report: Report, stopped: Callable[[], bool]) -> None:
    """Writes the shard's files, then its record.

    Raises DataError where the input is wrong, and StoppedError where ``stopped()`` is true.
    """
    partial = task.folder / f"shard-{task.number:05}.{partial_suffix()}"
    partial.mkdir(exist_ok=True)
    try:
        record, paths = _clean_into(task, partial, report, stopped)
        for path in paths:
            move_into_place(path, task.folder / path.relative_to(partial))
        write_json(record_path(task.folder, task.number), asdict(record))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _clean_into(
    task: CleanTask, partial: Path, report: Report, stopped: Callable[[], bool]
) -> tuple[CleanedShard, list[Path]]:
    """(the record, the files written below ``partial``, each at its later place below the task's folder)."""
    judge, counts = _judge(task.cleaning, task.folder / EVALUATIONS), _Counts()
    tally, hashes = Tally(task.source.max_bad_share), []
    near = task.cleaning.near
    signatures = Signatures(near, task.cleaning.words) if near is not None else None
    texts = text_path(partial, task.number)
    texts.parent.mkdir()
    n_bytes, n_characters, n_reported = 0.0, 0, 0
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    with texts.open("wb") as file, compressor.stream_writer(file, closefd=False) as writer:
        for text, done in read_documents(task.source, task.shard, task.key, tally):
            n_bytes, n_characters = n_bytes + done, n_characters + len(text)
            if text:
                verdict = _judged(judge, text, tally.n_documents - 1, counts)
                if verdict.reason is not None:
                    tally.drop(verdict.reason)
                else:
                    _keep(verdict.text, writer, counts)
                    if task.cleaning.exact:
                        hashes.append(xxhash.xxh3_128_digest(verdict.text.encode()))
                    if signatures is not None:
                        signatures.add(verdict.text, counts.n_kept - 1)
            if n_characters >= REPORTED:
                report(n_bytes, counts.n_kept - n_reported, 0)
                n_bytes, n_characters, n_reported = 0.0, 0, counts.n_kept
                if stopped():
                    raise StoppedError
    report(n_bytes, counts.n_kept - n_reported, 0)
    paths = [texts]
    if task.cleaning.exact:
        paths.append(_write_hashes(partial, task.number, hashes))
    if signatures is not None:
        paths += signatures.write(partial, task.number)
    assert tally.n_documents == counts.n_kept + sum(tally.dropped.values()), "each document is kept or dropped"
    record = CleanedShard(
        number=task.number,
        source=task.source_number,
        n_documents=tally.n_documents,
        n_kept=counts.n_kept,
        dropped=dict(sorted(tally.dropped.items())),
        changed=dict(sorted(counts.changed.items())),
        bad=tally.named,
        n_bytes=sum(piece.n_bytes for piece in task.shard),
        kept_bytes=counts.kept_bytes,
        text_xxh3=hash_file(texts),
        samples=dict(sorted(counts.samples.items())),
    )
    return record, paths


@functools.lru_cache(maxsize=1)
def _judge(config: CleaningConfig, index: Path) -> Judge:
    """The process's judge, cached since making it takes a second."""
    return Judge(config, index)


def _judged(judge: Judge, text: str, document: int, counts: _Counts) -> Verdict:
    """The verdict on a text; changes and samples are added to ``counts``, dropped documents are not counted."""
    text = text.encode(errors="replace").decode()  # JSON can hold lone surrogates, UTF-8 cannot
    verdict = judge(text)
    if verdict.reason is not None:
        counts.show(verdict.reason, Sample(document, text[:EXCERPT]))
    else:
        for stage in verdict.changed_by:
            counts.changed[stage] = counts.changed.get(stage, 0) + 1
            counts.show(stage, Sample(document, *_where_changed(text, verdict.text)))
    return verdict


def _where_changed(before: str, after: str) -> tuple[str, str]:
    """Excerpts of both texts around the first place where they differ."""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    start = max(0, at - EXCERPT // 4)
    return before[start : start + EXCERPT], after[start : start + EXCERPT]


def _keep(text: str, writer: BinaryIO, counts: _Counts) -> None:
    writer.write(json.dumps(text, ensure_ascii=False).encode() + b"\n")
    counts.n_kept += 1
    counts.kept_bytes += len(text.encode())


def _write_hashes(partial: Path, number: int, hashes: list[bytes]) -> Path:
    path = partial / f"hashes/{number:05}.npy"
    path.parent.mkdir()
    np.save(path, np.frombuffer(b"".join(hashes), ">u8").reshape(-1, 2).astype("<u8"))
    return path
