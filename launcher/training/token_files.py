"""A record, kept in the run directory, of the token files that a run began with, so that later starts read the same."""

import json
from pathlib import Path

from data.errors import DataError
from data.file_records import check_files, records_of_files
from data.prepared import Prepared, locate
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.run_parts import TOKEN_FILES, check_parts


def check_files_of_run(config: RunConfig, run_path: Path) -> None:
    """Raises UserError where a token file is not the one that the run in ``run_path`` began with. Reads only.

    A run without a record, or whose token files are still to be prepared, passes. So does a damaged record, which
    ``check_parts`` reports by itself.
    """
    path, prepared = run_path / TOKEN_FILES, _prepared(config)
    try:
        check_parts(run_path, TOKEN_FILES)
    except UserError:
        return
    if prepared is None or not path.exists():
        return
    try:
        check_files(config.data, prepared, json.loads(path.read_text()), path)
    except DataError as error:
        raise UserError(error.problems) from None


def token_files(config: RunConfig) -> str | None:
    """The record to be written at a run's first start, as JSON; None without token files, or where one exists."""
    if (config.run_path / TOKEN_FILES).exists():
        return None
    prepared = _prepared(config)
    return json.dumps(records_of_files(config.data, prepared), indent=1) + "\n" if prepared is not None else None


def _prepared(config: RunConfig) -> Prepared | None:
    try:
        return locate(config.data, config.model.vocab_size)
    except DataError as error:
        raise UserError(error.problems) from None
