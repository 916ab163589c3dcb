"""Checks of token files that Roundtable did not prepare: damage, no sample, ids outside the vocabulary."""

from pathlib import Path

import numpy as np

from data.config import DataConfig
from data.errors import DataError, problem
from data.remote_index import token_prefix
from data.sources import is_raw
from data.tokenfile import TokenFile, bin_path

# Ids of a file not prepared here that are checked before a run begins (0.02 s once in memory; 2026-11-21, one EPYC
# core); the others are checked as they are read.
FIRST_IDS = 100_000_000
CHUNK_IDS = 1 << 22
FIRST_REMOTE_IDS = 1 << 18  # a block or so of a file at a URL: every id checked has to be fetched


def check_foreign_files(config: DataConfig, vocab_size: int) -> None:
    """Opens the token files that were not prepared here, and checks the first FIRST_IDS ids of each.

    Raises DataError with a line for each file that is damaged, holds no sample, or an id outside the vocabulary.
    """
    named = {
        f"data.sources[{number}].path": source.path
        for number, source in enumerate(config.sources)
        if not is_raw(source)
    }
    if config.heldout_path is not None:
        named["data.heldout_path"] = config.heldout_path
    problems = []
    for key, path in named.items():
        try:
            file = TokenFile(token_prefix(config, path))
            line = _first_id_problem(file, vocab_size)
            problems += [line] if line is not None else []
            problems += [empty_problem(key, path)] if file.n_tokens < 2 else []
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(*dict.fromkeys(problems))


def _first_id_problem(file: TokenFile, vocab_size: int) -> str | None:
    stop = min(file.n_tokens, FIRST_IDS if not file.is_remote else FIRST_REMOTE_IDS)
    for start in range(0, stop, CHUNK_IDS):
        end = min(start + CHUNK_IDS, stop)
        file.prefetch(start, end)
        line = id_problem(file.tokens[start:end], vocab_size, file)
        if line is not None:
            return line
    return None


def empty_problem(key: str, path: str) -> str:
    """The line about token files that hold no sample; ``key`` is the config key that names them."""
    remedy = "remove it" if key.startswith("data.sources") else "name other token files, or set it to null"
    return problem(f"{key}={path!r}", "holds fewer than two tokens", remedy)


def id_problem(tokens: np.ndarray, vocab_size: int, file: TokenFile) -> str | None:
    """The line about an id among ``tokens`` of ``file`` that is outside the vocabulary; None where all are inside."""
    low, high = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if low < 0:
        return problem(f"{bin_path(file.prefix)}: token id {low}", "must not be negative", "write the file anew")
    return vocabulary_problem(vocab_size, high, bin_path(file.prefix)) if high >= vocab_size else None


def vocabulary_problem(vocab_size: int, largest_id: int, path: Path) -> str:
    """The line about a token file whose largest id is outside the vocabulary."""
    found = f"model.vocab_size={vocab_size} is smaller than the largest token id, {largest_id}, in {path}"
    return problem(found, "and must be above it", f"set model.vocab_size to {largest_id + 1} or more")
