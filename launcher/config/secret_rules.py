"""The rule that a config holds no secret, checked before any other problem is reported."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from launcher.config.secrets import MASK, is_secret_name, secret_spans
from launcher.config.words import show_key

_RULE = "must not hold a secret, for the config is copied into the run directory, every checkpoint and W&B"
_ENVIRONMENT = "environment"  # the key slurm.environment, whose items are NAME=value


def secret_problems(value: Any, keys: tuple[str | int, ...] = ()) -> Iterator[str]:
    """One line for each secret in a tree of plain values at ``keys``: where it is and the remedy, never the secret."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _in_key(key, below, (*keys, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from secret_problems(item, (*keys, index))
    elif isinstance(value, str):
        yield from _in_text(value, keys)


def _in_key(key: str, below: Any, keys: tuple[str | int, ...]) -> Iterator[str]:
    name = key.rpartition(".")[2]
    if list(secret_spans(key)):
        yield f"a key in {show_key(keys[:-1]) or 'the config'} {_RULE}; remove it"
    elif is_secret_name(name) and isinstance(below, (str, int, float)) and not isinstance(below, bool):
        yield f"{show_key(keys)}={MASK} {_RULE}; remove it, and {_set(name)}"
    else:
        yield from secret_problems(below, keys)


def _in_text(text: str, keys: tuple[str | int, ...]) -> Iterator[str]:
    is_variable = _ENVIRONMENT in keys
    found = [what for _, _, what in (*secret_spans(text, in_environment=is_variable), *secret_spans(unquote(text)))]
    if not found:
        return
    name, equals, _ = text.partition("=")
    if is_variable and equals and name.strip().isidentifier():
        told = f"{show_key(keys)}={name.strip()}={MASK}"
        yield f"{told} {_RULE}; write {name.strip()} alone, which takes the submitting shell's value"
    elif "URL" in found[0]:
        yield f"{show_key(keys)}={MASK} {_RULE} ({found[0]}); take it out of the URL, and set it in the environment"
    else:
        yield f"{show_key(keys)}={MASK} {_RULE} ({found[0]}); remove it, and set it in the environment"


def _set(name: str) -> str:
    return f"set {name} in the environment" if name.isidentifier() else "set it in the environment"
