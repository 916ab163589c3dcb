"""Dotted overrides: ``parallel.zero=2 optimizer.lr=2e-4 data.sources[0].path=x`` (or data.sources.0.path=x)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config.schema import alternatives, choose_alternative, field_hints, hint_at, is_nullable
from launcher.config.secret_rules import secret_problems
from launcher.config.secrets import mask
from launcher.config.tree import RunConfig
from launcher.config.words import show, show_key
from launcher.config.yaml_text import parse_yaml
from launcher.errors import UserError

MAX_PARTS = 10  # of a dotted key; the tree's deepest has four
_INDEX = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Override:
    """One ``key=value`` of the command line, its value parsed as YAML."""

    keys: tuple[str, ...]
    value: Any

    @property
    def text(self) -> str:
        """The override as a message shows it."""
        return f"{show_key(self.keys)}={show(self.value)}"


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The parsed overrides, and one line for each invalid text. Raises UserError for secrets, reporting these alone."""
    overrides, problems, secrets = [], [], []
    for text in texts:
        key, equals, raw = text.partition("=")
        keys = tuple(re.sub(r"\[([0-9]+)\]", r".\1", key).split("."))
        value, faults = parse_yaml(raw)
        if equals and not faults:
            secrets += secret_problems({key: value}) if len(keys) == 1 else secret_problems(value, keys)
        if not equals:
            problems.append(f"{show(text)} is not an override; write key=value, e.g. train.steps=100")
        elif len(keys) > MAX_PARTS:
            problems.append(
                f"{show(text)} has a key of {len(keys)} parts, and keys have at most {MAX_PARTS}; shorten it"
            )
        elif not all(keys):
            problems.append(f"{show(text)} has an empty name before '='; write key=value, e.g. train.steps=100")
        elif not raw.strip():
            remedy = f"{show_key(keys)}=null to unset it" if is_nullable(hint_at(RunConfig, keys)) else "leave it out"
            problems.append(f"{show_key(keys)}= has no value; write one, or {remedy}")
        elif faults:
            problems.append(f"{show_key(keys)}={show(raw)}: {faults[0][1]}")
        else:
            overrides.append(Override(keys=keys, value=value))
    if secrets:
        raise UserError(secrets)
    return overrides, [mask(line) for line in problems]


def _drop_old_alternatives(tree: dict[str, Any], override: Override) -> None:
    """Removes the YAML's keys that belong to another alternative than the one that ``override`` names."""
    union = hint_at(RunConfig, override.keys[:-1])
    chosen = choose_alternative(union, override.value) if len(alternatives(union)) > 1 else None
    node: Any = tree
    for key in override.keys[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if chosen is None or not isinstance(node, dict):
        return
    known = {name for alternative in alternatives(union) for name in field_hints(alternative)}
    for name in known - field_hints(chosen).keys():
        node.pop(name, None)


def _descend(node: Any, key: str, below: str | None) -> Any:
    """What ``node`` holds at ``key``; where that is absent or null, a new list or mapping, as ``below`` needs it.

    Raises KeyError with the reason where ``node`` can hold no such key.
    """
    if isinstance(node, list):
        if not _INDEX.fullmatch(key) or int(key) > len(node):
            raise KeyError(f"is a list of {len(node)}; write an index from 0 to {len(node)}")
        if int(key) == len(node):
            node.append(None)
    elif not isinstance(node, dict):
        raise KeyError(f"is {show(node)}, not a section")
    index: Any = int(key) if isinstance(node, list) else key
    held = node[index] if isinstance(node, list) else node.get(key)
    if below is not None and held is None:
        held = node[index] = [] if _INDEX.fullmatch(below) else {}
    return held


def _set(tree: dict[str, Any], override: Override) -> str | None:
    """Sets one value in ``tree``; returns a problem's line where it cannot."""
    node: Any = tree
    keys = override.keys
    for depth, key in enumerate(keys):
        below = keys[depth + 1] if depth + 1 < len(keys) else None
        try:
            held = _descend(node, key, below)
        except KeyError as error:
            return f"{override.text} cannot be set: {show_key(keys[:depth])} {error.args[0]}"
        if below is None:
            node[int(key) if isinstance(node, list) else key] = override.value
        node = held
    return None


def apply_overrides(tree: dict[str, Any], overrides: Sequence[Override]) -> list[str]:
    """Sets the overrides in ``tree``, in place and in order; returns one line for each that cannot be set.

    An override that changes a union's ``name`` first drops the YAML's keys that the new alternative lacks.
    """
    for override in {override.keys: override for override in overrides if override.keys[-1] == "name"}.values():
        _drop_old_alternatives(tree, override)
    return [problem for override in overrides if (problem := _set(tree, override)) is not None]
