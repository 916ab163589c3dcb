"""`roundtable config --keys`: every key with its default, its values and its meaning, read from the dataclasses.

A meaning is the comment beside the field, or the comment lines right above it where it is long. Python's None, True and
False in it are shown as YAML's null, true and false.
"""

import ast
import dataclasses
import difflib
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from launcher.config.ranges import Range, ranges
from launcher.config.schema import (
    alternative_name,
    alternatives,
    describe,
    field_default,
    field_hints,
    is_nullable,
    item_hint,
    literal_values,
)
from launcher.config.tree import RunConfig
from launcher.config.words import show
from launcher.console import open_console, say
from launcher.errors import UserError


@dataclass(frozen=True)
class Key:
    """One config key as it is listed."""

    key: str
    default: str  # as YAML has it; "required" where there is none
    values: str
    meaning: str


@cache
def meanings(section: type) -> dict[str, str]:
    """The comment of each field in the section's source, beside it or right above it; "" where there is none."""
    source = textwrap.dedent(inspect.getsource(section))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = [comments[node.lineno].string] if node.lineno in comments else _above(comments, node.lineno)
            text = " ".join(line.lstrip("# ") for line in lines)
            found[node.target.id] = re.sub(r"\b(None|True|False)\b", lambda match: _YAML[match[1]], text)
    return found


_YAML = {"None": "null", "True": "true", "False": "false"}


def _above(comments: dict[int, tokenize.TokenInfo], line: int) -> list[str]:
    """The comments that fill the lines right above ``line``, each a line of its own."""
    found: list[str] = []
    while (token := comments.get(line - len(found) - 1)) is not None and token.line.lstrip().startswith("#"):
        found.insert(0, token.string)
    return found


def all_keys(section: type = RunConfig, prefix: str = "") -> list[Key]:
    """Every key below ``section``, in the order of the tree. Of several alternatives the first one's default counts."""
    return list(_keys((section,), prefix))


def _keys(sections: tuple[type, ...], prefix: str) -> Iterator[Key]:
    """The keys of a section, or of the alternatives of a union together: each key once."""
    for name in dict.fromkeys(name for section in sections for name in field_hints(section)):
        owners = [section for section in sections if name in field_hints(section)]
        hint, key = field_hints(owners[0])[name], f"{prefix}{name}"
        inner = item_hint(hint) or hint
        if alternatives(inner):
            yield from _keys(alternatives(inner), f"{key}.")
        elif name == "name" and len(sections) > 1:
            names = ", ".join(alternative_name(each) for each in sections)
            yield Key(key, alternative_name(sections[0]), names, meanings(sections[0])[name])
        else:
            values = _values(hint, ranges(owners[0]).get(name))
            yield Key(key, _default(owners[0], name), values, _meaning(sections, owners, name))


def _default(section: type, name: str) -> str:
    value = field_default(section, name)
    return value if isinstance(value, str) else "required" if value is dataclasses.MISSING else show(value)


def _values(hint: Any, limits: Range | None) -> str:
    """The allowed values in words: a range, the choices, or a type."""
    inner = item_hint(hint) or hint
    if limits is not None:
        words = f"{limits.minimum:{_format(limits.minimum)}} to {limits.maximum:{_format(limits.maximum)}}"
    elif literal_values(inner):
        words = ", ".join(map(str, literal_values(inner)))
    else:
        return describe(hint)
    words = f"a list of {words}" if item_hint(hint) is not None else words
    return f"{words} or null" if is_nullable(hint) else words


def _format(number: float) -> str:
    return "" if isinstance(number, int) else "g"


def _meaning(sections: tuple[type, ...], owners: list[type], name: str) -> str:
    """The first owner's comment, with the names of the owners where not all have the key, and of other defaults."""
    text = meanings(owners[0])[name]
    if len(owners) < len(sections):
        text = f"{', '.join(alternative_name(each) for each in owners)}: {text}"
    others = {each: _default(each, name) for each in owners[1:] if _default(each, name) != _default(owners[0], name)}
    told = ", ".join(f"{alternative_name(each)}: {default}" for each, default in others.items())
    return f"{text} ({told})" if told else text


def print_keys(prefix: str, overrides: Sequence[str], *, as_json: bool) -> None:
    """Prints the keys that begin with ``prefix``: a table on a terminal, elsewhere one tab-separated line for each.

    Raises UserError where no key begins so, or where there are ``overrides``, which would change nothing.
    """
    if overrides:
        raise UserError([f"--keys takes no overrides, and {show(overrides[0])} is one; leave it out"])
    every = all_keys()
    found = [key for key in every if key.key.startswith(prefix)]
    if not found:
        names = {part for key in every for part in (key.key, key.key.partition(".")[0])}
        near = difflib.get_close_matches(prefix, sorted(names), n=1)
        remedy = f"did you mean {near[0]}?" if near else "leave it out to see all of them"
        raise UserError([f"--keys {show(prefix)} must be the beginning of a key; {remedy}"])
    if as_json:
        say(json.dumps([dataclasses.asdict(key) for key in found], indent=2))
    elif sys.stdout.isatty():
        _print_table(found)
    else:
        say("\n".join("\t".join(dataclasses.astuple(key)) for key in found))


def _print_table(keys: list[Key]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", no_wrap=True, style="cyan")
    table.add_column("default", overflow="fold")
    table.add_column("values", overflow="fold")
    table.add_column("meaning", overflow="fold", ratio=1)
    for key in keys:
        table.add_row(*(Text(cell) for cell in dataclasses.astuple(key)))
    open_console().print(table)
