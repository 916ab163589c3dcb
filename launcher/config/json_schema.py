"""`roundtable config --schema`: a JSON schema (draft 2020-12) of the config, read from the dataclasses, for editors.

It says what is true of one value alone: known keys, types, choices, ranges, where null may stand, and which keys each
alternative of a union has. Rules between values (`parallel.tp` divides `model.n_heads`) are checked by the commands
only. JSON Schema takes 8.0 for an integer, which a config does not, and knows no .nan.
"""

import dataclasses
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any

from launcher.config.keys import meanings
from launcher.config.ranges import Range, ranges
from launcher.config.schema import (
    alternative_name,
    alternatives,
    field_default,
    field_hints,
    is_nullable,
    item_hint,
    literal_values,
    members,
)
from launcher.config.tree import RunConfig
from launcher.config.words import show
from launcher.console import say
from launcher.errors import UserError

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}

Schema = dict[str, Any]


def config_schema() -> Schema:
    """The schema of a whole YAML file; each section's dataclass is in ``$defs`` once, by its class's name."""
    return {
        "$schema": DRAFT,
        "title": "A run of Roundtable",
        "$ref": _reference(RunConfig),
        "$defs": {section.__name__: _section(section, family) for section, family in _sections(RunConfig, ())},
    }


def _sections(section: type, family: tuple[type, ...]) -> Iterator[tuple[type, tuple[type, ...]]]:
    """``section`` and every section below it, each with all alternatives of the union that it belongs to."""
    yield section, family
    for hint in field_hints(section).values():
        below = alternatives(item_hint(hint) or hint)
        for alternative in below:
            yield from _sections(alternative, below)


def _reference(section: type) -> str:
    return f"#/$defs/{section.__name__}"


def _section(section: type, family: tuple[type, ...]) -> Schema:
    """The object that one dataclass describes: its keys and no others."""
    names = list(field_hints(section))
    required = [name for name in names if field_default(section, name) is dataclasses.MISSING]
    return {
        "type": "object",
        "description": _first_line(section),
        "properties": {name: _field(section, name, family) for name in names},
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _first_line(section: type) -> str:
    return (inspect.getdoc(section) or "").partition("\n")[0]


def _field(section: type, name: str, family: tuple[type, ...]) -> Schema:
    """One key: what it may hold, its meaning, its default where that is a plain value."""
    hint, default = field_hints(section)[name], field_default(section, name)
    texts = (meanings(each)[name] for each in (section, *family) if name in field_hints(each))
    text = next((text for text in texts if text), "")
    plain = default is None or isinstance(default, bool | int | float | str)
    return {
        **({"description": text} if text else {}),
        **_value(hint, ranges(section).get(name), default),
        **({"default": default} if plain else {}),
    }


def _value(hint: Any, limits: Range | None, default: Any = None) -> Schema:
    """The schema of a value of type ``hint``, numbers within ``limits``. A union without a name takes ``default``."""
    if alternatives(hint):
        found = _union(alternatives(hint), default)
        return {"anyOf": [found, {"type": "null"}]} if is_nullable(hint) else found
    null = ["null"] if is_nullable(hint) else []
    if item_hint(hint) is not None:
        return {"type": ["array", *null] if null else "array", "items": _value(item_hint(hint), limits)}
    if literal_values(hint):
        return {"enum": [*literal_values(hint), *([None] if null else [])]}
    types = [_TYPES[member] for member in members(hint) if member in _TYPES] + null
    found: Schema = {"type": types[0] if len(types) == 1 else types}
    if limits is not None:
        found |= {"minimum": plain(limits.minimum), "maximum": plain(limits.maximum)}
    return found


def _union(sections: Sequence[type], default: Any) -> Schema:
    """The schema of one section, or of the alternative that its ``name`` selects (without one, the default's)."""
    if len(sections) == 1:
        return {"$ref": _reference(sections[0])}
    names = [alternative_name(section) for section in sections]
    usual = default.name if dataclasses.is_dataclass(default) else names[0]  # pyright: ignore[reportAttributeAccessIssue]
    return {
        "type": "object",
        "properties": {"name": {"enum": names, "default": usual}},
        "allOf": [
            # without "required", an object that has no name meets the condition, too
            {
                "if": {"properties": {"name": {"const": name}}, **({} if name == usual else {"required": ["name"]})},
                "then": {"$ref": _reference(section)},
            }
            for name, section in zip(names, sections, strict=True)
        ],
    }


def schema_text() -> str:
    """The schema as indented JSON text."""
    return json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n"


def print_schema(given: Sequence[str]) -> None:
    """Prints the schema. Raises UserError where other arguments are ``given``, since they would change nothing."""
    if given:
        raise UserError([f"--schema takes nothing else, and {show(given[0])} is there; leave it out"])
    say(schema_text(), end="")


def plain(bound: float) -> float:
    """The bound, as an int if it is whole: Python caches types with 1000 and 1000.0 as one, whichever came first."""
    return int(bound) if float(bound).is_integer() else bound
