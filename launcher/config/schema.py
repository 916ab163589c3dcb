"""What the dataclasses of the config tree allow at each key: type hints, alternatives, defaults."""

import dataclasses
import types
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


@cache
def field_hints(section: type) -> dict[str, Any]:
    """The type hint of each field of dataclass ``section``, in order."""
    hints = get_type_hints(section)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def field_default(section: type, name: str) -> Any:
    """The default of one field, or ``dataclasses.MISSING`` where it must be given."""
    field = next(field for field in dataclasses.fields(section) if field.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint itself alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def alternatives(hint: Any) -> tuple[type, ...]:
    """The dataclasses among the members of ``hint``: none for a plain value, several for a union with a ``name``."""
    return tuple(member for member in members(hint) if dataclasses.is_dataclass(member) and isinstance(member, type))


def is_nullable(hint: Any) -> bool:
    """Whether ``hint`` allows null."""
    return types.NoneType in members(hint)


def item_hint(hint: Any) -> Any:
    """The hint of a list's items, or None where ``hint`` allows no list."""
    for member in members(hint):
        if get_origin(member) is tuple:
            return get_args(member)[0]
    return None


def literal_values(hint: Any) -> tuple[Any, ...]:
    """The values that the literals in ``hint`` allow."""
    return tuple(value for member in members(hint) if get_origin(member) is Literal for value in get_args(member))


def alternative_name(section: type) -> str:
    """The ``name`` that selects ``section`` in a union."""
    return literal_values(field_hints(section)["name"])[0]


def choose_alternative(hint: Any, name: Any) -> type | None:
    """The dataclass that ``name`` selects in the union ``hint``, or None."""
    return next((section for section in alternatives(hint) if alternative_name(section) == name), None)


def hint_at(root: type, keys: Sequence[str]) -> Any:
    """The hint at the dotted key ``keys`` below ``root``, looking into every alternative; None where there is none.

    A list's items are found by a number, and the keys of its items also without one.
    """
    hint: Any = root
    for key in keys:
        if item_hint(hint) is not None and not key.isdigit():
            hint = item_hint(hint)
        found = [field_hints(section)[key] for section in alternatives(hint) if key in field_hints(section)]
        if key.isdigit() and item_hint(hint) is not None:
            found = [item_hint(hint)]
        if not found:
            return None
        hint = found[0]
    return hint


def leaf_keys(section: type, prefix: str = "", *, with_nullable: bool = False) -> Iterator[str]:
    """Every dotted key below ``section`` that holds a plain value, over all alternatives; list items without index.

    ``with_nullable``: also the keys of sections that may be null.
    """
    for name, hint in field_hints(section).items():
        inner = item_hint(hint) if item_hint(hint) is not None else hint
        if not alternatives(inner) or (with_nullable and is_nullable(hint)):
            yield prefix + name
        for alternative in alternatives(inner):
            yield from leaf_keys(alternative, f"{prefix}{name}.", with_nullable=with_nullable)


_PLAIN = {int: "an integer", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}


def describe(hint: Any) -> str:
    """The rule that ``hint`` states, in plain words: "an integer or null"."""
    words = []
    for member in members(hint):
        if member in _PLAIN:
            words.append(_PLAIN[member])
        elif get_origin(member) is Literal:
            words.append("one of " + ", ".join(map(str, get_args(member))))
        elif get_origin(member) is tuple:
            words.append("a list")
        elif "a section" not in words:
            words.append("a section")
    return " or ".join(words)
