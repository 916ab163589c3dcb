"""A run's data for the `roundtable data` commands: its config, its dataset as trained on, and each step's samples."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.config import SourceConfig
from data.dataset import Dataset, open_dataset
from data.errors import DataError, problem
from data.prepared import locate
from data.sources import expand_path, input_files, reads_files
from data.spans import Span, document_name
from data.tokenfile import bin_path, idx_path
from launcher.config.tree import RunConfig
from launcher.console import say
from launcher.errors import UserError
from launcher.training.ledger_rows import StepData, steps_of
from launcher.training.run_dir import in_start_folder, saved_config
from launcher.training.run_parts import CONFIG, TOKEN_FILES, check_parts
from launcher.training.token_files import check_files_of_run

RUNS_DIR = "runs"


@dataclass(frozen=True)
class DataOfRun:
    """A run's config, dataset and tokenizer. The config's seed and data section never change during a run."""

    name: str  # as the user gave it
    path: Path
    config: RunConfig
    dataset: Dataset
    tokenizer: Path | None  # the prepared tokenizer's folder

    def steps(self) -> Iterator[StepData]:
        """Each recorded step with the samples that it consumed. Raises UserError where there is no sound record."""
        return steps_of(self.path, self.config)

    def step(self, number: int) -> StepData:
        """The step of this number. Raises UserError where the run has no record of it."""
        first = reached = 0
        for each in self.steps():
            if each.step == number:
                return each
            first, reached = first or each.step, each.step
        own = "" if first <= 1 else f" since it was branched at step {first - 1}"
        rule = f"must be a step of {self.name}, which has made {reached}{own}; give {first} to {reached}"
        raise UserError([f"--step={number} {rule}"])


def open_run(name: str) -> DataOfRun:
    """The data of the run in the directory ``name``, or of that name below runs.

    Raises UserError where there is no such run, or its token files are not those that it began with, and DataError
    where they are gone or damaged.
    """
    path = next((path for path in (Path(name), Path(RUNS_DIR) / name) if (path / CONFIG).exists()), None)
    config = saved_config(path) if path is not None else None
    if path is None or config is None:
        raise UserError(
            [f"RUN={name} must be a run directory, or a run's name below {RUNS_DIR}; see `roundtable runs`"]
        )
    run_path = path.absolute()
    with in_start_folder(path, config):
        check_token_files(config)
        check_parts(run_path, TOKEN_FILES)
        check_files_of_run(config, run_path)
        vocab_size = config.model.vocab_size
        dataset = open_dataset(config.data, seed=config.seed, vocab_size=vocab_size, split="train")
        prepared = locate(config.data, vocab_size)
        kept = prepared.tokenizer if prepared is not None else None
        tokenizer = kept.absolute() if kept is not None else None
    return DataOfRun(name, path, config, dataset, tokenizer)


def check_token_files(config: RunConfig) -> None:
    """Raises DataError, naming the missing files, where a source's token files are gone.

    Without PREFIX.bin and PREFIX.idx, the source would be taken for raw text that is not prepared yet.
    """
    if locate(config.data, config.model.vocab_size) is not None:
        return
    gone = []
    for number, source in enumerate(config.data.sources):
        prefix, found = Path(expand_path(source.path)), f"data.sources[{number}].path={source.path!r}"
        missing = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
        if len(missing) == 1:
            rule = f"must be there as the run read it, and {missing[0]} is gone"
        elif missing and reads_files(source) and not has_input(source):
            rule = (
                f"must be there as the run read it, and {' and '.join(missing)} are gone; so is any text of that path"
            )
        else:
            continue
        gone.append(problem(found, rule, "put the files back"))
    if gone:
        raise DataError(*gone)


def has_input(source: SourceConfig) -> bool:
    """Whether any raw text lies at the source's path."""
    try:
        return bool(input_files(source, ""))
    except DataError:
        return False


def span_row(dataset: Dataset, span: Span) -> dict[str, Any]:
    """A span as ``--json`` prints it: a half-open range of the file's tokens; ``offset`` is from the document's start.

    ``left_out``: the run never sees the document (data.without). ``targets``, of a file with a mask: the ranges of
    tokens whose prediction from this span counts.
    """
    stop = min(span.stop + 1, dataset.files[span.file].document_range(span.document)[1])
    masked = {"targets": dataset.masks.ranges(span.file, span.first + 1, stop)} if dataset.masks.has(span.file) else {}
    return {
        "sample": span.sample,
        "document": document_name(dataset, span.file, span.document),
        "file": str(dataset.files[span.file].prefix),
        "tokens": [span.first, span.stop],
        "offset": span.offset,
        "left_out": dataset.left_out.holds(span.file, span.first),
        **masked,
    }


def say_json(tree: dict[str, Any]) -> None:
    """Prints ``tree`` as one line of JSON."""
    say(json.dumps(tree))
