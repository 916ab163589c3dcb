"""The ids of special tokens in config.json, kept with a checkpoint where the model folder has no tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.errors import reason_of
from launcher.errors import UserError
from launcher.importing.folder import CONFIG_JSON
from modeling.families.config_json import REMEDY, SpecialTokens
from modeling.families.values import checked, shown

TOKEN_IDS_JSON = "token_ids.json"  # the name of the file in a checkpoint
KEYS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "pad_token_id"}


def read_token_ids(path: Path, content: Mapping[str, Any]) -> SpecialTokens:
    """The ids in config.json's ``content``; transformers' default for a key that is left out.

    Raises UserError where one is no id.
    """
    told = {key: content[key] for key in KEYS.values() if key in content}
    if len(told) < len(KEYS):
        from transformers import AutoConfig  # takes seconds to import

        taken = AutoConfig.for_model(content["model_type"])
        told = {key: getattr(taken, key, None) for key in KEYS.values()} | told
    try:
        return of_keys(told)
    except ValueError as error:
        raise UserError([f"{path / CONFIG_JSON}: {error}; {REMEDY}"]) from None


def dump_token_ids(special: SpecialTokens) -> bytes:
    """The content of a checkpoint's TOKEN_IDS_JSON for these ids."""
    return json.dumps({key: getattr(special, name) for name, key in KEYS.items()}).encode()


def parse_token_ids(content: bytes) -> SpecialTokens:
    """The ids in the content of TOKEN_IDS_JSON. Raises ValueError, with the rule that it breaks, where it is wrong."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"must be JSON, and is not ({reason_of(error)})") from None
    if not isinstance(tree, dict):
        raise ValueError(f"must hold a JSON object, and holds {type(tree).__name__}")
    try:
        return of_keys(tree)
    except ValueError as error:
        raise ValueError(f"must hold ids, and {error}") from None


def of_keys(told: Mapping[str, Any]) -> SpecialTokens:
    """The ids from a table of config.json's keys; EOS may have several. Raises ValueError where one is no id."""
    found: dict[str, Any] = {}
    for name, key in KEYS.items():
        value = told.get(key)
        hint = tuple[int, ...] if name == "eos" and isinstance(value, list) else int | None
        try:
            found[name] = checked(value, hint)
        except ValueError as error:
            raise ValueError(f"{key}={shown(value)} is not possible: {error}") from None
    return SpecialTokens(**found)
