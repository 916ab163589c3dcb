"""Preparation: from raw text to token files, on several processes, restartable, and completed atomically.

Everything is checked before anything is created. Then each shard's token files and its small record are written
atomically, and a source's manifest is written once all its shards exist.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from data.chat_tokens import check_template
from data.cleaning.groups import cleaning_of, groups_of
from data.cleaning.inputs import check_cleaned, write_cleaned_from
from data.cleaning.run import check_stages, clean_sources
from data.cleaning.summary import summary_of
from data.config import DataConfig, SourceConfig
from data.documents import files_to_read, read_documents
from data.errors import DataError, refuse
from data.fim import fim_ids
from data.hub import corpus_files
from data.manifest import (
    FORMAT,
    INPUTS,
    MASKED_FORMAT,
    SourceManifest,
    hash_file,
    read_source_manifest,
    remove_abandoned,
    write_json,
    write_source_manifest,
)
from data.packed import missing_packings, packed_by_of, write_packing
from data.places import nearest_existing
from data.prepared import Prepared, check_inputs, inputs_tree, locate, source_folder, token_files
from data.refusals import refusals_of
from data.rules import check_data
from data.shards import Plan, plan_shards
from data.shardwriter import ShardRecord, ShardTask, no_room, read_record
from data.sources import is_raw
from data.tokenfile import token_dtype
from data.tokenizer import bos_id_of, tokenizer_folder
from data.tokenizer_setup import set_up_tokenizer
from data.workers import run_in_processes, write_shards

BYTES_PER_TOKEN = 2.5  # bytes of text for a token, at least, with any tokenizer; for the estimate of disk only
CLEANED_SHARE = 0.5  # cleaned texts and their signatures, over the text's bytes; for the estimate of disk only
FEW_FILES = 8  # up to so many are packed faster here than it takes to start processes
Report = Callable[[int, int, int, int], None]  # bytes of text done, bytes in all (0: unknown), documents, tokens


def prepare(
    config: DataConfig, *, vocab_size: int, progress: Report | None = None, task: tuple[int, int] | None = None
) -> Prepared | None:
    """Prepares the missing parts of the tokenizer and the raw sources' token files; returns the prepared data.

    ``task=(k, n)`` does the k-th of n shares of the shards (k from 0), so that n jobs can work in parallel; whichever
    finds all shards finished writes the manifests, and the others return None. Raises DataError, with nothing created,
    where the config or the corpus is wrong or the disk too small.
    """
    problems = check_data(config, vocab_size)
    if problems:
        raise DataError(*problems)
    plans = plan_sources(config, vocab_size)
    check_room(config, plans, vocab_size)
    if config.cleaning is not None and plans:
        check_stages(config.cleaning, Path(config.token_dir))
    remove_abandoned(Path(config.token_dir))
    had = set(Path(config.token_dir).glob("*"))
    try:
        with refusals_of(config.token_dir):
            return _carry_out(config, plans, vocab_size, progress, task or (0, 1))
    except (DataError, OSError) as error:
        if task is None:
            _remove_fruitless(config, plans, vocab_size, had)
        if isinstance(error, OSError):
            raise no_room(Path(config.token_dir), error) from error
        raise


def _carry_out(
    config: DataConfig, plans: list[Plan], vocab_size: int, progress: Report | None, task: tuple[int, int]
) -> Prepared | None:
    """Makes cleaned texts, the tokenizer, this task's shards and manifests; None while other tasks are unfinished."""
    if config.cleaning is not None:
        cleaned = _clean(config, plans, progress, task)
        if cleaned is None:
            return None
        plans = cleaned
    tokenizer = set_up_tokenizer(config, vocab_size, [(plan.source, plan.shards, plan.key) for plan in plans])
    if config.fim_rate:  # checked before tokens are made, since another tokenizer would need new ones
        fim_ids(config, tokenizer, vocab_size)
    tasks = [job for plan in plans for job in _begin_source(config, plan, tokenizer)]
    for job in tasks:
        if job.number == 0 and job.source.chat is not None:
            check_template(job)  # now, since other sources' tokens may take hours
    share, n_shares = task
    _write_missing(tasks[share::n_shares], config.workers, progress)
    finished = [_finish_source(config, plan, tokenizer) for plan in plans]
    prepared = locate(config, vocab_size) if all(finished) else None
    if prepared is not None:
        pack_documents(config, prepared)
    return prepared


def _clean(config: DataConfig, plans: list[Plan], progress: Report | None, task: tuple[int, int]) -> list[Plan] | None:
    """The plans with shards of cleaned texts instead of raw ones; None while other tasks' shares are unfinished."""
    known = {plan.number: plan for plan in plans}

    def look(number: int) -> Plan:
        return known.get(number) or _plan_source(config, number)

    shards = clean_sources(config, sorted(known), look, progress, task)
    if shards is None:
        return None
    return [replace(plan, shards=shards[number]) for number, plan in sorted(known.items())]


def pack_documents(config: DataConfig, prepared: Prepared) -> None:
    """Writes the missing packings of all token files; does nothing where documents are laid end to end.

    Raises DataError where a file's index contradicts itself, or where a packing cannot be written beside it.
    """
    packed_by = packed_by_of(config)
    missing = [(each, config.seq_len, packed_by) for each in missing_packings(config, token_files(config, prepared))]
    for folder in {prefix.parent for prefix, *_ in missing}:
        remove_abandoned(folder)  # left by a preparation that was killed while packing, its last step
    if len(missing) > FEW_FILES:
        run_in_processes(write_packing, missing, config.workers, lambda *_: None)
    elif packed_by is not None:
        for prefix, seq_len, _ in missing:
            write_packing(prefix, seq_len, packed_by)


def _remove_fruitless(config: DataConfig, plans: list[Plan], vocab_size: int, had: set[Path]) -> None:
    """Deletes the folders that a refused call created and that hold no finished shard; ``had`` existed before it.

    A refused call leaves nothing behind except what a second try can resume from: where a shard was finished, also the
    tokenizer and cleaned texts. The folder of a source without one would only cause its corrected text to be refused as
    another corpus.
    """
    known = (_folder_if_known(config, plan.source, vocab_size) for plan in plans)
    folders = [folder for folder in known if folder is not None]
    shared = [tokenizer_folder(config, vocab_size), *(group.folder for group in groups_of(config))]
    made = [folder for folder in (*folders, *shared) if folder is not None and folder not in had]
    fruitless = [folder for folder in made if not any(folder.glob("shard-*.json"))]
    for folder in fruitless:
        if folder in folders or len(fruitless) == len(made):
            shutil.rmtree(folder, ignore_errors=True)
    token_dir = Path(config.token_dir)
    if token_dir.is_dir() and not any(token_dir.iterdir()):
        token_dir.rmdir()


def plan_sources(config: DataConfig, vocab_size: int) -> list[Plan]:
    """The raw sources that are not yet prepared, each with its files and shards.

    Raises DataError where a corpus is missing, empty, without ``text_key``, or changed since preparation began.
    """
    raw = [(number, source) for number, source in enumerate(config.sources) if is_raw(source)]
    folders = {number: _folder_if_known(config, source, vocab_size) for number, source in raw}
    check_cleaned(config, {number: folder for number, folder in folders.items() if folder is not None})
    plans, problems = [], []
    for number, source in enumerate(config.sources):
        key = f"data.sources[{number}]"
        try:
            if is_raw(source) and not _is_finished(config, source, vocab_size, key):
                plans.append(_plan_source(config, number))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(*problems)
    return plans


def _plan_source(config: DataConfig, number: int) -> Plan:
    source, key = config.sources[number], f"data.sources[{number}]"
    files = files_to_read(source, key)
    if source.chat is not None and (texts := [file.path for file in files if file.kind in ("text", "warc")]):
        remedy = "give jsonl, parquet, Arrow or hf://NAME, or set chat to null"
        raise refuse(f"{key}.chat", f"needs records, and {texts[0]} is text", remedy)
    shards = plan_shards(source, files, config.shard_bytes, key)
    if not any(text for shard in shards for text, _ in read_documents(source, shard, key)):
        raise refuse(f"{key}.path={source.path!r}", "holds no text", "give a path to a corpus that is not empty")
    return Plan(source, number, files or corpus_files(source, key), shards)


def _is_finished(config: DataConfig, source: SourceConfig, vocab_size: int, key: str) -> bool:
    folder = _folder_if_known(config, source, vocab_size)
    if folder is None or not folder.is_dir():
        return False
    check_inputs(folder, source, key)
    return read_source_manifest(folder) is not None


def _folder_if_known(config: DataConfig, source: SourceConfig, vocab_size: int) -> Path | None:
    """The source's folder; None while its tokenizer, on which its name depends, does not exist."""
    tokenizer = tokenizer_folder(config, vocab_size)
    return source_folder(config, source, tokenizer) if tokenizer is not None and tokenizer.is_dir() else None


def check_room(config: DataConfig, plans: list[Plan], vocab_size: int) -> None:
    """Raises DataError where the disk of data.token_dir has less free space than the estimate of what is missing."""
    tokenizer = tokenizer_folder(config, vocab_size)
    needed = 0 if tokenizer is None or tokenizer.is_dir() else 150 * vocab_size
    for plan in plans:
        folder = _folder_if_known(config, plan.source, vocab_size)
        missing = [s for n, s in enumerate(plan.shards) if folder is None or read_record(folder, n) is None]
        n_bytes = sum(piece.n_bytes for shard in missing for piece in shard)
        needed += int(n_bytes * CLEANED_SHARE) if config.cleaning is not None else 0
        needed += int(n_bytes / BYTES_PER_TOKEN * token_dtype(vocab_size).itemsize)
    stats = os.statvfs(nearest_existing(config.token_dir))
    free = stats.f_bavail * stats.f_frsize
    if needed > free:
        found = f"data.token_dir={config.token_dir!r}: {free / 1e6:.1f} MB are free on its disk"
        rule = f"but the tokens of data.sources are estimated to take {needed / 1e6:.1f} MB"
        raise refuse(found, rule, "free some, or set data.token_dir to another disk")


def _begin_source(config: DataConfig, plan: Plan, tokenizer: Path | None) -> list[ShardTask]:
    """Creates the source's folder, or resumes it, and returns the tasks of all its shards."""
    assert tokenizer is not None
    folder, bos_id = source_folder(config, plan.source, tokenizer), bos_id_of(config, tokenizer)
    check_inputs(folder, plan.source, plan.key)
    folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder)
    if not (folder / INPUTS).exists():
        if config.cleaning is not None:
            write_cleaned_from(folder, Path(config.token_dir) / str(cleaning_of(config, plan.source)))
        write_json(folder / INPUTS, inputs_tree(plan.files))
    return [
        ShardTask(folder, number, shard, plan.source, plan.key, tokenizer, config.heldout_fraction, bos_id)
        for number, shard in enumerate(plan.shards)
    ]


def _write_missing(tasks: list[ShardTask], workers: int | None, progress: Report | None) -> None:
    """Writes the shards that have no record; ``progress`` is called with totals that include the finished ones."""
    records = [read_record(task.folder, task.number) for task in tasks]
    done = [record for record in records if record is not None]
    sizes = [sum(piece.n_bytes for piece in task.shard) for task in tasks]
    finished_bytes = sum(size for size, record in zip(sizes, records, strict=True) if record is not None)
    totals = [float(finished_bytes), sum(r.n_documents for r in done), sum(f.n_tokens for r in done for f in r.files)]

    def report(n_bytes: float, n_documents: int, n_tokens: int) -> None:
        for i, n in enumerate((n_bytes, n_documents, n_tokens)):
            totals[i] += n
        if progress is not None:
            progress(round(totals[0]), sum(sizes), int(totals[1]), int(totals[2]))

    report(0, 0, 0)
    write_shards([task for task, record in zip(tasks, records, strict=True) if record is None], workers, report)


def _finish_source(config: DataConfig, plan: Plan, tokenizer: Path | None) -> bool:
    """Writes the source's manifest if all its shards are finished; returns whether they are.

    Raises DataError, and deletes the folder, where no document is left.
    """
    tasks = _begin_source(config, plan, tokenizer)
    folder = tasks[0].folder
    records = [read_record(folder, task.number) for task in tasks]
    there = [record for record in records if record is not None]
    if len(there) < len(tasks):
        return False
    if not any(record.n_documents for record in there):
        shutil.rmtree(folder)
        n_left_out = sum(sum(record.dropped.values()) for record in there)
        rule = f"keeps none of its documents: all {n_left_out} are empty, or cannot be read"
        raise refuse(f"{plan.key}.path={plan.source.path!r}", rule, "mend them, or give another path")
    moved = _task_for_empty_split(tasks, there)
    if moved is not None:
        write_shards([moved], config.workers, lambda *_: None)
        there[moved.number] = _expect_record(folder, moved.number)
    files = [file for record in there for file in record.files]
    manifest = SourceManifest(
        format=FORMAT if all(file.n_targets is None for file in files) else MASKED_FORMAT,
        inputs_xxh3=hash_file(folder / INPUTS),
        largest_id=max(file.largest_id for file in files),
        train=tuple(record.train for record in there if record.train is not None),
        heldout=tuple(record.heldout for record in there if record.heldout is not None),
        cleaning=summary_of(config, plan.source) if config.cleaning is not None else None,
    )
    write_source_manifest(folder, manifest)
    return True


def _expect_record(folder: Path, number: int) -> ShardRecord:
    record = read_record(folder, number)
    assert record is not None
    return record


def _task_for_empty_split(tasks: list[ShardTask], records: list[ShardRecord]) -> ShardTask | None:
    """The task to rewrite a shard with one document moved, where a split came out empty; None where none did.

    The document with the smallest hash moves to the held-out split, or the one with the largest to the training split,
    so the choice depends on the corpus alone. A single document is always for training.
    """
    documents = {s: sum(f.n_documents for r in records if (f := getattr(r, s))) for s in ("train", "heldout")}
    hashed = [record for record in records if record.n_documents]
    if documents["train"] == 0:
        chosen = max(hashed, key=lambda r: (r.largest, r.number))
        assert chosen.largest is not None
        return replace(tasks[chosen.number], forced=(chosen.largest[1], "train"))
    if documents["heldout"] == 0 and documents["train"] > 1 and tasks[0].heldout_fraction > 0:
        chosen = min(hashed, key=lambda r: (r.smallest, r.number))
        assert chosen.smallest is not None
        return replace(tasks[chosen.number], forced=(chosen.smallest[1], "heldout"))
    return None
