"""Reading YAML 1.2 into plain values, with problems reported by line: `3e-4` is a float, `no` is text."""

import functools
import json
import re
import stat
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, MaxDepthExceededError
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from launcher.config.secret_rules import secret_problems
from launcher.config.secrets import mask
from launcher.config.words import cut, show
from launcher.errors import UserError

# Limits with which reading takes at most about a second; a usual config has a hundredth of them.
MAX_BYTES = 262_144
MAX_LEVELS = 32
MAX_VALUES = 8_000  # lists, maps, keys and plain values, with the aliases written out
MAX_PROBLEMS = 20  # reported for one text
_TOO_LARGE = f"must have at most {MAX_BYTES:,} bytes; give a YAML config, e.g. configs/quickstart.yaml"
_TOO_DEEP = f"must have at most {MAX_LEVELS} levels of lists and maps; a config needs no more than 6"
_TOO_MANY = f"must have at most {MAX_VALUES:,} values; give a YAML config, e.g. configs/quickstart.yaml"
_DEEP = re.compile(
    rf"(?:[\[{{]\s*){{{MAX_LEVELS + 1}}}"
)  # the parser knows it too, but looks far ahead of each bracket

_TAG = "tag:yaml.org,2002:"
_TAGS = {_TAG + kind for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "merge")}


class _PlainConstructor(SafeConstructor):
    """Builds str, int, float, bool, None, list and dict only: what looks like a date stays text."""


_PlainConstructor.add_constructor(_TAG + "timestamp", SafeConstructor.construct_yaml_str)


class _TooManyValues(MarkedYAMLError):
    """The text holds more than MAX_VALUES."""


class _BoundedComposer(Composer):
    """Stops at MAX_VALUES, since the parser takes a second for so many. An anchor's name may be used again."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader=loader)
        self.warn_double_anchors = False
        self._n_values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """The next node; ruamel calls this for each. Raises _TooManyValues above MAX_VALUES."""
        self._n_values += 1
        if self._n_values > MAX_VALUES:
            raise _TooManyValues(None, None, _TOO_MANY, self.parser.peek_event().start_mark)
        return super().compose_node(parent, index)


def _parser() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.version = (1, 2)
    yaml.Composer = _BoundedComposer
    yaml.Constructor = _PlainConstructor
    yaml.max_depth = MAX_LEVELS
    return yaml


def _first_line(error: Exception) -> str:
    text = getattr(error, "problem", None) or str(error) or type(error).__name__
    return text.splitlines()[0]


def _syntax_problem(error: Exception) -> tuple[int | None, str]:
    """The line (from 1, or None if unknown) and the message of a syntax error."""
    mark = getattr(error, "problem_mark", None) if isinstance(error, MarkedYAMLError) else None
    line = None if mark is None else mark.line + 1
    text = _first_line(error)
    if isinstance(error, MaxDepthExceededError):
        return line, _TOO_DEEP
    if isinstance(error, _TooManyValues):
        return line, _TOO_MANY
    if "'\\t'" in text:
        return line, "a tab cannot indent YAML; use spaces"
    if "single document" in str(error) or "another document" in text:
        return line, "a second document begins (---); keep one per file"
    return line, f"not valid YAML ({text[:200]}); check indentation, quotes and brackets"


class _Surveyed(Exception):
    """Raised where the survey of a document has found problems: the line, from 1, and the message of each."""

    def __init__(self, problems: list[tuple[int, str]]) -> None:
        super().__init__(problems)
        self.problems = problems


class _Survey:
    """A walk over a document's nodes, each once, that collects problems and the size with all aliases written out.

    Aliases of aliases let a document grow exponentially, so this must run before anything that expands them.
    """

    def __init__(self) -> None:
        self.problems: list[tuple[int, str]] = []
        self._known: dict[int, tuple[int, int] | None] = {}  # None: being walked
        self._is_too_large = False

    def walk(self, node: Node) -> tuple[int, int]:
        """The number of values within ``node``, itself included, and of their levels, with aliases written out."""
        line = node.start_mark.line + 1
        if id(node) in self._known:
            known = self._known[id(node)]
            if known is None:
                self.problems.append((line, "an alias (*) refers to what contains it; write the value out"))
            return known or (1, 1)
        self._known[id(node)] = None
        if str(node.tag) not in _TAGS:
            tag = cut(str(node.tag).replace(_TAG, "!!"))
            self.problems.append((line, f"the tag {tag} is not known; write plain text, numbers, lists and maps"))
        parts: list[Node] = []
        if isinstance(node, SequenceNode):
            parts = node.value
        elif isinstance(node, MappingNode):
            self._look_at_keys(node)
            parts = [part for pair in node.value for part in pair]
        sizes = [self.walk(part) for part in parts]
        values, levels = 1 + sum(size for size, _ in sizes), 1 + max((depth for _, depth in sizes), default=0)
        self._known[id(node)] = values, levels
        if (values > MAX_VALUES or levels > MAX_LEVELS) and not self._is_too_large:
            self._is_too_large = True
            what = f"more than {MAX_VALUES:,} values, or {MAX_LEVELS} levels,"
            self.problems.append((line, f"the aliases (*) make {what} of this; write out what you need"))
        return values, levels

    def _look_at_keys(self, node: MappingNode) -> None:
        """Adds a problem for each key that is not text or appears twice."""
        first_lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode) or str(key.tag) not in (_TAG + "str", _TAG + "merge"):
                shown = show(key.value) if isinstance(key, ScalarNode) else "a list or map"
                self.problems.append((line, f"{shown} is used as a key; keys are text"))
            elif key.value in first_lines:
                words = f"the key {show(key.value)} appears twice (first on line {first_lines[key.value]}); keep one"
                self.problems.append((line, words))
            else:
                first_lines[key.value] = line


def parse_yaml(text: str) -> tuple[Any, list[tuple[int | None, str]]]:
    """The value that ``text`` holds, and its problems as (line from 1 or None, message). None as value if any.

    No two parts of the value share an object, though the text may use aliases. Takes at most about a second, whatever
    the text holds.
    """
    if len(text) > MAX_BYTES:
        return None, [(None, _TOO_LARGE)]
    if (deep := _DEEP.search(text)) is not None:
        return None, [(text.count("\n", 0, deep.start()) + 1, _TOO_DEEP)]
    try:
        return json.loads(_to_json(text)), []
    except _Surveyed as found:
        return None, [(line, mask(words)) for line, words in [*dict.fromkeys(found.problems)][:MAX_PROBLEMS]]
    except Exception as error:  # on odd text ruamel raises KeyError, OverflowError and others beside its own
        line, words = _syntax_problem(error)
        return None, [(line, mask(words))]


@functools.lru_cache(maxsize=16)
def _to_json(text: str) -> str:
    """The value that ``text`` holds, as JSON. Raises _Surveyed, or whatever ruamel raises.

    Cached for the last texts, since a command reads its run's config up to four times.
    """
    yaml, survey = _parser(), _Survey()
    node = yaml.compose(text)
    if node is None:
        return "null"
    survey.walk(node)
    if survey.problems:
        raise _Surveyed(survey.problems)
    return json.dumps(yaml.constructor.construct_document(node))


def _read(path: Path) -> bytes:
    """The file's bytes; raises OSError, or UserError where it is no file or too large to be a config. Never waits."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError([f"{path}: must be a file, and is a pipe or a device; write the YAML into a file"])
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UserError([f"{path}: {_TOO_LARGE}"])
    return data


def read_yaml_file(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty mapping.

    Raises UserError, every problem one line with the file's name and the line number. A file that holds a secret is
    refused for that alone, since other problems would show values.
    """
    try:
        text = _read(path).decode()
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
    secrets = [f"{path}: {line}" for line in secret_problems(value or {})]
    if secrets:
        raise UserError(secrets)
    return value or {}
