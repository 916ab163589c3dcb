"""What a run began with of token files at URLs: kept beside the run, since a cache may be empty at the next start."""

import json

from data.errors import DataError
from data.remote_index import check_records, records_of
from data.sources import is_url
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.run_parts import REMOTE_TOKENS, check_parts


def names_urls(config: RunConfig) -> bool:
    """Whether a token file of this config lies at a URL."""
    return any(is_url(path) for path in (*(s.path for s in config.data.sources), config.data.heldout_path or ""))


def check_remote_tokens(config: RunConfig) -> None:
    """Raises UserError where an object is not the one that the run began with, whatever this machine's cache holds."""
    path = config.run_path / REMOTE_TOKENS
    if not names_urls(config) or not path.exists():
        return
    check_parts(config.run_path, REMOTE_TOKENS)
    try:
        check_records(config.data, json.loads(path.read_text()), path)
    except DataError as error:
        raise UserError(error.problems) from None


def remote_tokens(config: RunConfig) -> str | None:
    """What is to be kept at a run's first start, as text; None where there is nothing, or it is kept already."""
    if not names_urls(config) or (config.run_path / REMOTE_TOKENS).exists():
        return None
    try:
        return json.dumps(records_of(config.data), indent=1) + "\n"
    except DataError as error:
        raise UserError(error.problems) from None
