"""Opening the token files of the sources, after checking them against what preparation recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from data.config import DataConfig
from data.errors import DataError, refuse
from data.foreign import empty_problem, vocabulary_problem
from data.manifest import size_problems
from data.packed import packed_by_of, read_packing
from data.packing import Packing
from data.prepared import Prepared, PreparedSource, source_names
from data.tokenfile import TokenFile

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Source:
    """The opened token files of one source. Samples are numbered through all of them."""

    weight: float
    files: tuple[TokenFile, ...]
    trusted: bool  # prepared here: the manifest has the largest id, so batches' ids need no check
    name: str = ""  # its name in metrics
    packings: tuple[Packing, ...] = ()  # one for each file, for the dataset's seq_len; empty: laid end to end


def packings_of(files: Sequence[TokenFile], config: DataConfig) -> tuple[Packing, ...]:
    """The files' packings, which preparation wrote; empty where documents are laid end to end."""
    packed_by = packed_by_of(config)
    return tuple(read_packing(file, config.seq_len, packed_by) for file in files) if packed_by is not None else ()


def open_source(part: PreparedSource, split: Split, vocab_size: int, config: DataConfig, name: str = "") -> Source:
    """Maps the files of one source. Raises DataError where they do not match their manifest or the vocabulary."""
    if part.manifest is not None:
        problems = size_problems(part.path, part.manifest)
        if part.manifest.largest_id >= vocab_size:
            problems.append(vocabulary_problem(vocab_size, part.manifest.largest_id, part.path))
        if problems:
            raise DataError(*problems)
    files = tuple(TokenFile(prefix) for prefix in part.prefixes(split))
    trusted, packings = part.manifest is not None, packings_of(files, config)
    return Source(part.source.weight, files, trusted=trusted, name=name, packings=packings)


def open_heldout(config: DataConfig, prepared: Prepared, vocab_size: int) -> list[Source]:
    """The held-out parts of the raw sources that have any. Raises DataError where none has."""
    named = zip(prepared.sources, source_names(config), strict=True)
    sources = [open_source(part, "heldout", vocab_size, config, name) for part, name in named]
    sources = [source for source in sources if has_samples(source)]
    if not sources:
        found = f"data.heldout_fraction={config.heldout_fraction} and data.heldout_path=null"
        remedy = (
            "set data.heldout_path to the PREFIX of token files, add raw text with a heldout_fraction above 0, or "
            "train without evaluations (train.eval_every_steps=null)"
        )
        raise refuse(found, "leave nothing to evaluate on", remedy)
    return sources


def check_not_empty(config: DataConfig, sources: list[Source]) -> None:
    """Raises DataError for each training source without a sample, which could not give its share of the mixture."""
    problems = [
        empty_problem(f"data.sources[{number}].path", config.sources[number].path)
        for number, source in enumerate(sources)
        if not has_samples(source)
    ]
    if problems:
        raise DataError(*problems)


def has_samples(source: Source) -> bool:
    """Whether a source has a sample."""
    if source.packings:
        return any(packing.n_samples for packing in source.packings)
    return any(file.n_tokens > 1 for file in source.files)
