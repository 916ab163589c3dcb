"""Reading YAML 1.2 into plain values, with problems told by line: `3e-4` is a float, `no` is text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from launcher.errors import UserError

_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge")}


class _PlainConstructor(SafeConstructor):
    """Builds str, int, float, bool, None, list and dict only: what looks like a date stays text."""


_PlainConstructor.add_constructor(_TAG + "timestamp", SafeConstructor.construct_yaml_str)


def _parser() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 2)
    yaml.Constructor = _PlainConstructor
    return yaml


def _first_line(error: Exception) -> str:
    text = getattr(error, "problem", None) or str(error) or type(error).__name__
    return text.splitlines()[0]


def _syntax_problem(error: Exception) -> tuple[int | None, str]:
    """The line (from 1) and the words of a syntax error."""
    mark = getattr(error, "problem_mark", None) if isinstance(error, MarkedYAMLError) else None
    line = None if mark is None else mark.line + 1
    text = _first_line(error)
    if "'\\t'" in text:
        return line, "a tab cannot indent YAML; use spaces"
    if "single document" in str(error) or "another document" in text:
        return line, "a second document begins (---); keep one per file"
    return line, f"not valid YAML ({text}); check indentation, quotes and brackets"


def _node_problems(node: Node, above: tuple[int, ...] = ()) -> Iterator[tuple[int, str]]:
    """Duplicate keys, keys that are not text, foreign tags and loops of aliases, each with its line (from 1)."""
    line = node.start_mark.line + 1
    if id(node) in above:
        yield line, "an alias (*) refers to what contains it; write the value out"
        return
    if str(node.tag) not in _TAGS:
        yield (
            line,
            f"the tag {str(node.tag).replace(_TAG, '!!')} is not known; write plain text, numbers, lists and maps",
        )
    if isinstance(node, SequenceNode):
        for item in node.value:
            yield from _node_problems(item, (*above, id(node)))
    if isinstance(node, MappingNode):
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            key_line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode) or str(key.tag) not in (_TAG + "str", _TAG + "merge"):
                shown = repr(key.value) if isinstance(key, ScalarNode) else "a list or map"
                yield key_line, f"{shown} is used as a key; keys are text"
            elif key.value in first_lines:
                yield (
                    key_line,
                    f"the key {key.value!r} appears twice (first on line {first_lines[key.value]}); keep one",
                )
            else:
                first_lines[key.value] = key_line
            yield from _node_problems(value, (*above, id(node)))


def parse_yaml(text: str) -> tuple[Any, list[tuple[int | None, str]]]:
    """The value that ``text`` holds, and its problems (line from 1, or None; words). The value is None if any.

    No two parts of the value share an object, though the text may use aliases.
    """
    try:
        node = _parser().compose(text)
        problems: list[tuple[int | None, str]] = [] if node is None else list(_node_problems(node))
        return (None, problems) if problems else (json.loads(json.dumps(_parser().load(text))), [])
    except (YAMLError, ValueError) as error:  # ValueError: a number with thousands of digits
        return None, [_syntax_problem(error)]


def read_yaml_file(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty mapping.

    Raises UserError, every problem one line with the file's name and the line number.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            [f"{path}: no such file; give the path of a YAML config, e.g. configs/quickstart.yaml"]
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError([f"{path}:{line}: not UTF-8 text; save the file as UTF-8"]) from None
    except OSError as error:
        raise UserError([f"{path}: cannot be read ({error.strerror}); give a readable YAML file"]) from None
    value, problems = parse_yaml(text)
    if problems:
        raise UserError([f"{path}:{line}: {words}" if line else f"{path}: {words}" for line, words in problems])
    if value is not None and not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else "a single value"
        raise UserError([f"{path}:1: the file holds {kind}; write keys at the top level, e.g. name: my-run"])
    return value or {}
