"""Cleaning from end to end: shards, then pairs of copies, then which copies are removed; restartable task by task.

Sources are cleaned together where copies are removed, since these may lie in any source, and otherwise each by itself.
"""

import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.cleaning.config import CleaningConfig
from data.cleaning.duplicates import PARTS, find_exact_pairs, settle
from data.cleaning.evaluations import write_index
from data.cleaning.groups import Group, groups_of, settings_of
from data.cleaning.inputs import check_unchanged, inputs_of
from data.cleaning.judge import judge_here
from data.cleaning.kept import DUPLICATES, CleanedShard, counts_of, read_cleaned, text_path
from data.cleaning.near import find_pairs, pairs_name
from data.cleaning.shard import EVALUATIONS, CleanTask, clean_shard
from data.config import DataConfig
from data.errors import refuse
from data.manifest import INPUTS, remove_abandoned, write_json
from data.shards import Plan, Shard, Slice
from data.workers import run_in_processes, run_shards

FEW_SHARDS = 32  # up to so many are searched for copies here faster than processes are started
EXAMPLES = 3  # reasons that a refusal names
LIBRARIES = ("datatrove", "spacy", "fasttext-numpy2-wheel")
Progress = Callable[[int, int, int, int], None]


def check_stages(config: CleaningConfig, folder: Path) -> None:
    """Raises DataError where a stage is not available on this machine. Importing what they need takes seconds."""
    judge_here(config, folder / EVALUATIONS)


def clean_sources(
    config: DataConfig,
    wanted: Sequence[int],
    look: Callable[[int], Plan],
    progress: Progress | None,
    task: tuple[int, int],
) -> dict[int, list[Shard]] | None:
    """Source number -> shards of its cleaned texts, for the ``wanted`` sources; None while other tasks are unfinished.

    ``look(number)`` gives a source's plan. ``task=(k, n)`` does the k-th of n shares of each step; the next step begins
    when all shares are finished. Raises DataError where nothing of a source is kept.
    """
    found: dict[int, list[Shard]] = {}
    waiting = False
    for group in groups_of(config):
        if not set(group.numbers) & set(wanted):
            continue
        sources = {number: look(number) for number in group.numbers}
        done = _clean_group(config, group, sources, progress, task)
        if done is None:
            waiting = True
            continue
        for number in sorted(set(group.numbers) & set(wanted)):
            found[number] = _cleaned_shards(group, sources[number], [each for each in done if each.source == number])
    return None if waiting else found


def _clean_group(
    config: DataConfig,
    group: Group,
    sources: dict[int, Plan],
    progress: Progress | None,
    task: tuple[int, int],
) -> list[CleanedShard] | None:
    """Does this task's share of cleaning a group; returns all shards' records; None while others are unfinished."""
    assert config.cleaning is not None
    cleaning, (share, n_shares) = config.cleaning, task
    _begin(cleaning, config, group, sources)
    jobs = [(number, shard) for number, each in sources.items() for shard in each.shards]
    tasks = [
        CleanTask(group.folder, place, number, shard, sources[number].source, sources[number].key, cleaning)
        for place, (number, shard) in enumerate(jobs)
    ]
    _clean_missing(tasks, tasks[share::n_shares], config.workers, progress)
    records = [record for each in tasks if (record := read_cleaned(group.folder, each.number)) is not None]
    if len(records) < len(tasks):
        return None
    if not cleaning.is_global or (group.folder / DUPLICATES).exists():
        return records
    exact = [group.folder / pairs_name("exact", part) for part in range(PARTS)] if cleaning.exact else []
    near = [group.folder / pairs_name("near", n) for n in range(cleaning.near.buckets if cleaning.near else 0)]
    steps: list[tuple[Any, ...]] = [(_exact, group.folder, part, len(tasks)) for part in range(len(exact))]
    steps += [(_near, cleaning, group.folder, bucket, len(tasks)) for bucket in range(len(near))]
    missing = [step for step, path in zip(steps, [*exact, *near], strict=True) if not path.exists()]
    mine = [step for step in missing if steps.index(step) % n_shares == share]
    if len(tasks) <= FEW_SHARDS:
        for step in mine:
            _run(*step)
    else:
        run_in_processes(_run, mine, config.workers, _silent)
    if not all(path.exists() for path in [*exact, *near]):
        return None
    settle(group.folder, records, exact, near)
    return records


def _run(function: Callable[..., Any], *arguments: Any) -> None:
    function(*arguments)


def _exact(folder: Path, part: int, n_shards: int) -> None:
    find_exact_pairs(folder, part, n_shards)


def _near(cleaning: CleaningConfig, folder: Path, bucket: int, n_shards: int) -> None:
    assert cleaning.near is not None
    find_pairs(cleaning.near, folder, bucket, n_shards)


def _silent(*_: object) -> None:
    pass


def _begin(cleaning: CleaningConfig, config: DataConfig, group: Group, sources: dict[int, Plan]) -> None:
    """Creates the group's folder, or resumes it. Raises DataError where its input files have changed since it began."""
    folder, inputs = group.folder, inputs_of(cleaning, sources)
    folder.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder)
    for inner in ("pairs", "removed", EVALUATIONS):
        remove_abandoned(folder / inner)
    if group.settings.exists():
        check_unchanged(folder, inputs)
        return
    n_texts = n_short = 0
    if cleaning.decontaminate is not None:
        n_texts, n_short = write_index(cleaning.decontaminate, cleaning.words, folder / EVALUATIONS)
    write_json(folder / INPUTS, inputs)
    texts = {"texts": n_texts, "too_short_to_be_found": n_short}
    write_json(group.settings, {**settings_of(config, group.numbers), "evaluations": texts, "versions": _versions()})


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _clean_missing(
    tasks: Sequence[CleanTask], mine: Sequence[CleanTask], workers: int | None, progress: Progress | None
) -> None:
    """Cleans the shards of ``mine`` without a record; ``progress`` is called with totals that include finished ones."""
    folder = tasks[0].folder
    records = {task.number: read_cleaned(folder, task.number) for task in tasks}
    sizes = {task.number: sum(piece.n_bytes for piece in task.shard) for task in tasks}
    done = [record for record in records.values() if record is not None]
    totals = [float(sum(sizes[record.number] for record in done)), float(sum(record.n_kept for record in done))]

    def report(n_bytes: float, n_documents: int, _: int) -> None:
        totals[0] += n_bytes
        totals[1] += n_documents
        if progress is not None:
            progress(round(totals[0]), sum(sizes.values()), int(totals[1]), 0)

    report(0, 0, 0)
    run_shards(clean_shard, [task for task in mine if records[task.number] is None], workers, report)


def _cleaned_shards(group: Group, source: Plan, records: Sequence[CleanedShard]) -> list[Shard]:
    """A shard of cleaned texts for each shard of the source. Raises DataError where no text is kept at all."""
    paths = [text_path(group.folder, record.number) for record in records]
    counts = [counts_of(path)[:2] for path in paths]
    n_documents, n_dropped = (sum(found) for found in zip(*((n, sum(d.values())) for n, d in counts), strict=True))
    if n_dropped == n_documents:
        reasons: dict[str, int] = {}
        for _, dropped in counts:
            for reason, count in dropped.items():
                reasons[reason] = reasons.get(reason, 0) + count
        most = sorted(reasons.items(), key=lambda each: (-each[1], each[0]))[:EXAMPLES]
        told = ", ".join(f"{count} {reason}" for reason, count in most)
        found = f"{source.key}.path={source.source.path!r}"
        rule = f"keeps none of its {n_documents} documents after data.cleaning ({told})"
        raise refuse(found, rule, f"loosen these stages, or leave the source out; {group.folder} has samples")
    return [
        (Slice(str(path), "cleaned", record.number, record.number + 1, record.kept_bytes),)
        for path, record in zip(paths, records, strict=True)
    ]
