"""`roundtable data diff`: the first step at which two runs were given different data, and what differs."""

import dataclasses
import hashlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from data.dataset import Dataset
from data.manifest import hash_file
from data.spans import Span, spans_of
from data.tokenfile import TokenFile, bin_path, idx_path, mask_path, remote_path
from launcher.commands.data_run import DataOfRun, open_run, say_json, span_row
from launcher.commands.data_show import cuts_of, fim_row, note_of, step_row, words_of
from launcher.tables import plain_table, wide_console
from launcher.training.ledger_rows import StepData
from launcher.training.run_dir import changes

# The config keys that decide which tokens a step is given; where token files lie and how they are made does not.
DECIDES = (
    "seed",
    *(
        f"data.{key}"
        for key in (
            "seq_len",
            "packing",
            "sources",
            "weighting",
            "stages",
            "without",
            "fim_rate",
            "fim_spm_share",
            "fim_tokens",
        )
    ),
    "train.global_batch_size",
    "train.batch_ramp",
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first step whose windows of tokens are not the same in both runs, in the same order."""

    steps: tuple[StepData, StepData]
    n_equal: int  # sequences from the batch's first on that are the same
    n_shared: int  # windows that both batches hold, in any order
    spans: tuple[list[Span], list[Span]]  # of the first sequence that differs; none where a batch has ended


def show_difference(names: tuple[str, str], *, as_json: bool) -> int:
    """Prints the first step at which the data of the two runs differ; returns 0 where none does, else 1.

    Raises UserError where a run does not exist or has no sound record, and DataError where a token file is gone.
    """
    runs = open_run(names[0]), open_run(names[1])
    n_same, found, untrained = compare(*runs)
    config = [
        {"key": key, "values": [str(ours), str(theirs)]}
        for key, ours, theirs in changes(runs[0].config, runs[1].config)
        if key.startswith(DECIDES)
    ]
    if as_json:
        tree: dict[str, Any] = {
            "runs": list(names),
            "same_steps": n_same,
            "config": config,
            "dropped_by_one": untrained,
        }
        say_json(tree | {"difference": difference_row(runs, found) if found is not None else None})
    else:
        print_difference(runs, n_same, found, untrained, config)
    return 0 if found is None else 1


def compare(ours: DataOfRun, theirs: DataOfRun) -> tuple[int, Difference | None, int | None]:
    """(number of first steps with the same data, the difference in the next step, first step dropped by one run alone).

    Steps that only one of the runs has made are no difference. Where everything that decides the order of the samples
    is the same, the samples' numbers are compared, else the windows of tokens that they stand for.
    """
    files = same_files(ours.dataset, theirs.dataset)
    has_one_order = in_one_order(ours, theirs, files)
    n_same, dropped_by_one = 0, None
    for pair in pairs_of(ours.steps(), theirs.steps()):
        one, other = pair
        is_same = (one.begin, one.last_sample, one.hopped) == (other.begin, other.last_sample, other.hopped)
        if not (has_one_order and is_same):
            keys = [
                windows_of(run, step, numbers) for run, step, numbers in zip((ours, theirs), pair, files, strict=True)
            ]
            if not np.array_equal(keys[0], keys[1]):
                return n_same, describe((ours, theirs), pair, keys), dropped_by_one
        if one.trained != other.trained and None not in (one.trained, other.trained):
            dropped_by_one = dropped_by_one or one.step
        n_same += 1
    return n_same, None, dropped_by_one


def windows_of(run: DataOfRun, step: StepData, numbers: list[int]) -> np.ndarray:
    """One row for each sequence of the step, int64 [B, 6]; rows of two runs are equal where they read the same tokens.

    The columns: the number of its file among ``numbers``, which both runs share; its window; seq_len; and 0 where no
    document of the window is left out, else a hash of the left-out ranges.
    """
    file_B, *others = run.dataset.windows(step.samples())
    seq_len_B, left_out_B = np.full_like(file_B, run.dataset.seq_len), np.zeros_like(file_B)
    row_L, *range_L = run.dataset.parts_left_out(step.samples())
    for row in set(row_L.tolist()):
        ranges = np.array(range_L)[:, row_L == row].tobytes()
        left_out_B[row] = int.from_bytes(hashlib.sha256(ranges).digest()[:7])
    return np.stack([np.array(numbers, np.int64)[file_B], *others, seq_len_B, left_out_B], axis=1)


def pairs_of(ours: Iterator[StepData], theirs: Iterator[StepData]) -> Iterator[tuple[StepData, StepData]]:
    """Pairs of steps with the same number; a branched run has no steps from before its parent's checkpoint."""
    one, other = next(ours, None), next(theirs, None)
    while one is not None and other is not None:
        if one.step == other.step:
            yield one, other
        number = max(one.step, other.step) + (one.step == other.step)
        one = one if one.step >= number else next(ours, None)
        other = other if other.step >= number else next(theirs, None)


def describe(runs: tuple[DataOfRun, DataOfRun], steps: tuple[StepData, StepData], keys: list[np.ndarray]) -> Difference:
    """The difference between two batches, whose windows are ``keys`` and not all equal."""
    rows = [list(map(tuple, key.tolist())) for key in keys]
    n_equal = next(n for n, (a, b) in enumerate(zip_longest(*rows)) if a != b)
    spans = [
        list(spans_of(run.dataset, step.samples()[n_equal : n_equal + 1]))
        for run, step in zip(runs, steps, strict=True)
    ]
    return Difference(steps, n_equal, len(set(rows[0]) & set(rows[1])), (spans[0], spans[1]))


def in_one_order(ours: DataOfRun, theirs: DataOfRun, files: tuple[list[int], list[int]]) -> bool:
    """Whether each sample's number stands for the same tokens in both runs."""
    one, other = ours.config, theirs.config
    is_same = (one.seed, one.data.seq_len, one.data.packing) == (other.seed, other.data.seq_len, other.data.packing)
    is_same = is_same and (ours.dataset.stages, ours.dataset.fim) == (theirs.dataset.stages, theirs.dataset.fim)
    is_same = is_same and ours.dataset.left_out.documents == theirs.dataset.left_out.documents
    return is_same and files[0] == files[1] and ours.dataset.file_sources == theirs.dataset.file_sources


def same_files(ours: Dataset, theirs: Dataset) -> tuple[list[int], list[int]]:
    """A number for each token file of the two datasets; files with the same bytes get the same number.

    Files of the same inode are the same without being read. Others are hashed only where both datasets have a file of
    that size.
    """
    places = [[_place(file) for file in dataset.files] for dataset in (ours, theirs)]
    sizes = [[_sizes(file) for file in dataset.files] for dataset in (ours, theirs)]
    common = set(sizes[0]) & set(sizes[1]) if set(places[0]) != set(places[1]) else set()
    known: dict[tuple[Any, ...], int] = {}
    numbers = []
    for dataset, places_F, sizes_F in zip((ours, theirs), places, sizes, strict=True):
        keys = [
            hash_of(file) if size in common else place
            for file, place, size in zip(dataset.files, places_F, sizes_F, strict=True)
        ]
        numbers.append([known.setdefault(key, len(known)) for key in keys])
    return numbers[0], numbers[1]


def hash_of(file: TokenFile) -> tuple[str, ...]:
    """The hashes of the .bin, the .idx and, where there is one, the .mask; reads these files completely."""
    paths = (bin_of(file), idx_path(file.prefix), mask_path(file.prefix))
    return tuple(hash_file(path) for path in paths if path.exists())


def bin_of(file: TokenFile) -> Path:
    """The .bin, or what stands for one at a URL: its address, size and version."""
    return remote_path(file.prefix) if file.is_remote else bin_path(file.prefix)


def _place(file: TokenFile) -> tuple[int, int]:
    status = bin_of(file).stat()
    return status.st_dev, status.st_ino


def _sizes(file: TokenFile) -> tuple[int, int]:
    return file.n_tokens * file.dtype.itemsize, file.n_documents


def difference_row(runs: tuple[DataOfRun, DataOfRun], found: Difference) -> dict[str, Any]:
    """A difference as ``--json`` prints it; in lists of two, the first run comes first."""
    rows = zip(found.steps, rows_of(runs, found), strict=True)
    sides = [{**step_row(step), "first_different": spans} for step, spans in rows]
    return {"step": found.steps[0].step, "equal_sequences": found.n_equal, "shared": found.n_shared, "sides": sides}


def rows_of(runs: tuple[DataOfRun, DataOfRun], found: Difference) -> list[list[dict[str, Any]]]:
    """For each run, a row for each span of the first different sequence, with its fill-in-the-middle cut, if any."""
    rows = []
    for run, step, spans in zip(runs, found.steps, found.spans, strict=True):
        cuts = cuts_of(run, step)
        rows.append([span_row(run.dataset, span) | fim_row(cuts, span) for span in spans])
    return rows


def print_difference(
    runs: tuple[DataOfRun, DataOfRun],
    n_same: int,
    found: Difference | None,
    untrained: int | None,
    config: list[dict[str, Any]],
) -> None:
    """Prints what ``compare`` found in words, and a table of the first different sequence's spans."""
    console = wide_console()
    for line in lines_of(runs, n_same, found, untrained, config):
        console.print(line)
    if found is None:
        return
    table = plain_table("run", ">sample", "document", ">from token", ">up to", "")
    for run, rows in zip(runs, rows_of(runs, found), strict=True):
        for row in rows:
            first, stop = row["tokens"]
            table.add_row(run.name, str(row["sample"]), row["document"], str(first), str(stop - 1), note_of(row))
    console.print(table)


def lines_of(
    runs: tuple[DataOfRun, DataOfRun],
    n_same: int,
    found: Difference | None,
    untrained: int | None,
    config: list[dict[str, Any]],
) -> Iterator[str]:
    """Lines on what is the same and what differs, which stand before the table of the first different sequence."""
    if untrained is not None:
        yield f"step {untrained}: the same data, but one of the two dropped the update"
    if found is None:
        yield f"the same data in all {n_same} steps that both have made"
        return
    one, other = found.steps
    yield f"the same data in {n_same} steps; step {one.step} differs:"
    for run, step in zip(runs, found.steps, strict=True):
        yield f"  {run.name}: {words_of(step)}"
    if found.n_equal == min(one.n_samples, other.n_samples):
        yield f"the batch sizes differ; the first {found.n_equal} sequences are the same"
    elif found.n_shared == one.n_samples == other.n_samples:
        yield "the same sequences in another order"
    else:
        same = f"the first {found.n_equal} of each are the same, in the same order"
        yield f"the two batches have {found.n_shared} sequences in common; {same}"
    for each in config:
        yield f"config: {each['key']} is {each['values'][0]} and {each['values'][1]}"
