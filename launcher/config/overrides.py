"""Dotted overrides: ``parallel.zero=2 optimizer.lr=2e-4 data.sources[0].path=x`` (or data.sources.0.path=x)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config.schema import alternatives, choose_alternative, field_hints, hint_at
from launcher.config.tree import RunConfig
from launcher.config.words import show
from launcher.config.yaml_text import parse_yaml


@dataclass(frozen=True)
class Override:
    """One ``key=value`` of the command line, its value parsed as YAML."""

    keys: tuple[str, ...]
    value: Any

    @property
    def text(self) -> str:
        """The override as a message shows it."""
        return f"{'.'.join(self.keys)}={show(self.value)}"


def parse_overrides(texts: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The overrides, and one line for each text that is none."""
    overrides, problems = [], []
    for text in texts:
        key, equals, raw = text.partition("=")
        keys = tuple(re.sub(r"\[(\d+)\]", r".\1", key).split("."))
        value, faults = parse_yaml(raw)
        if not equals:
            problems.append(f"{show(text)} is not an override; write key=value, e.g. train.steps=100")
        elif not all(keys):
            problems.append(f"{show(text)} has an empty name before '='; write key=value, e.g. train.steps=100")
        elif not raw.strip():
            problems.append(f"{key}= has no value; write one, or {key}=null to unset it")
        elif faults:
            problems.append(f"{key}={show(raw)}: {faults[0][1]}")
        else:
            overrides.append(Override(keys=keys, value=value))
    return overrides, problems


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
        if not key.isdigit() or int(key) > len(node):
            raise KeyError(f"is a list of {len(node)}; write an index from 0 to {len(node)}")
        if int(key) == len(node):
            node.append(None)
    elif not isinstance(node, dict):
        raise KeyError(f"is {show(node)}, not a section")
    index: Any = int(key) if isinstance(node, list) else key
    held = node[index] if isinstance(node, list) else node.get(key)
    if below is not None and held is None:
        held = node[index] = [] if below.isdigit() else {}
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
            return f"{override.text} cannot be set: {'.'.join(keys[:depth])} {error.args[0]}"
        if below is None:
            node[int(key) if isinstance(node, list) else key] = override.value
        node = held
    return None


def apply_overrides(tree: dict[str, Any], overrides: Sequence[Override]) -> list[str]:
    """Changes ``tree`` in place, in order; returns one line for each override that cannot be set.

    An override that changes a union's ``name`` first drops the YAML's keys that the new alternative lacks.
    """
    for override in {override.keys: override for override in overrides if override.keys[-1] == "name"}.values():
        _drop_old_alternatives(tree, override)
    return [problem for override in overrides if (problem := _set(tree, override)) is not None]
