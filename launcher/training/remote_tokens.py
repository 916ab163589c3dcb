"""A record, kept in the run directory, of the token files at URLs as they were when the run began.

A later start compares the objects with it, since this machine's cache may be empty by then.
"""

import json

from data.errors import DataError
from data.remote_index import check_records, records_of
from data.sources import is_url
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.run_parts import REMOTE_TOKENS, check_parts


def names_urls(config: RunConfig) -> bool:
    """Whether any of the config's token files lies at a URL."""
    return any(is_url(path) for path in (*(s.path for s in config.data.sources), config.data.heldout_path or ""))


def check_remote_tokens(config: RunConfig) -> None:
    """Raises UserError where an object at a URL is not the one that the run began with.

    The stores are asked, whatever this machine's cache holds. A run without a record passes.
    """
    path = config.run_path / REMOTE_TOKENS
    if not names_urls(config) or not path.exists():
        return
    check_parts(config.run_path, REMOTE_TOKENS)
    try:
        check_records(config.data, json.loads(path.read_text()), path)
    except DataError as error:
        raise UserError(error.problems) from None


def remote_tokens(config: RunConfig) -> str | None:
    """The record to be written at a run's first start, as JSON; None without token files at URLs, or where one exists.

    Raises UserError where a store does not answer for an object.
    """
    if not names_urls(config) or (config.run_path / REMOTE_TOKENS).exists():
        return None
    try:
        return json.dumps(records_of(config.data), indent=1) + "\n"
    except DataError as error:
        raise UserError(error.problems) from None
