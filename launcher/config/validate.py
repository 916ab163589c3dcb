"""Building a RunConfig from a tree of plain values, or one line for each thing that is wrong with it."""

import dataclasses
import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from launcher.config.schema import (
    alternative_name,
    alternatives,
    choose_alternative,
    describe,
    field_default,
    field_hints,
    is_nullable,
    item_hint,
    leaf_keys,
    literal_values,
    members,
)
from launcher.config.tree import RunConfig
from launcher.config.words import join_or, show, show_key

# What YAML 1.1 and others take for a boolean, and 1.2 does not.
_MEANT = {"yes": True, "on": True, "y": True, "1": True, "no": False, "off": False, "n": False, "0": False}


@cache
def _validator() -> SchemaValidator:
    """The check of types and names alone; ``launcher.config.ranges`` checks the ranges of numbers."""
    return SchemaValidator(_without_bounds(TypeAdapter(RunConfig).core_schema))


def _without_bounds(schema: Any) -> Any:
    """The schema without the bounds of numbers that pydantic reads from ``Interval``: its messages have no remedy."""
    if isinstance(schema, dict):
        return {key: _without_bounds(value) for key, value in schema.items() if key not in ("ge", "le")}
    return [_without_bounds(each) for each in schema] if isinstance(schema, list) else schema


def build_config(tree: dict[str, Any]) -> tuple[RunConfig | None, list[str]]:
    """The config that ``tree`` describes and no problems, or None and every problem. May change ``tree``."""
    found = dict(_fill_names(tree, RunConfig, ()))
    _replace_infinite(tree, (), found)
    try:
        config = _validator().validate_json(json.dumps(tree), strict=True, extra="forbid")
        return (None if found else config), list(found.values())
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_context=False):
            for key, line in _explain(fault, tree):
                found.setdefault(key, line)
        return None, list(found.values())


def _fill_names(value: Any, hint: Any, keys: tuple[str | int, ...], default: Any = None) -> Iterator[tuple[str, str]]:
    """Fills a union's missing ``name`` from the default, in place; yields (key, line) for each unknown name."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _fill_names(item, item_hint(hint), (*keys, index))
    if not isinstance(value, dict) or not alternatives(hint):
        return
    section = alternatives(hint)[0]
    if len(alternatives(hint)) > 1:
        fallback = default if dataclasses.is_dataclass(default) else section()
        name = value.setdefault("name", getattr(fallback, "name", None))
        chosen = choose_alternative(hint, name)
        if chosen is None:
            key = show_key((*keys, "name"))
            yield (
                key,
                f"{key}={show(name)} {_must_be_one_of(name, [alternative_name(each) for each in alternatives(hint)])}",
            )
            return
        section = chosen
    for name, inner in field_hints(section).items():
        if name in value:
            yield from _fill_names(value[name], inner, (*keys, name), field_default(section, name))


def _replace_infinite(node: Any, keys: tuple[str | int, ...], found: dict[str, str]) -> None:
    """Adds a line to ``found`` for each .nan and .inf in ``node``, which JSON cannot carry, and puts 0 in its place."""
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(items):
        if isinstance(value, float) and not math.isfinite(value):
            dotted = show_key((*keys, key))
            found.setdefault(dotted, f"{dotted}={show(value)} must be a finite number; write one, e.g. 1e-3")
            node[key] = 0
        _replace_infinite(value, (*keys, key), found)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a fault lies: the dotted key, the section that holds it, and what the section says about it."""

    keys: tuple[str | int, ...]
    section: type
    hint: Any  # None: the section has no such key
    value: Any
    union: Any = None  # the hint of the section, where it is one of several alternatives


def _locate(loc: Sequence[str | int], tree: dict[str, Any]) -> _Place | None:
    """The place of pydantic's ``loc``, or None where it speaks of an alternative that was not chosen."""
    hint, value, section, union, keys = RunConfig, tree, RunConfig, None, ()
    for part in loc:
        if len(alternatives(hint)) > 1 and isinstance(part, str):  # pydantic names the alternative's class
            if not isinstance(value, dict):
                break
            chosen = choose_alternative(hint, value.get("name"))
            if chosen is None or chosen.__name__ != part:
                return None
            union, hint = hint, chosen
            continue
        if alternatives(hint):
            section = alternatives(hint)[0]
            hint = field_hints(section).get(str(part))
        elif item_hint(hint) is not None:
            hint = item_hint(hint)
        else:
            break
        union = union if alternatives(union) and section in alternatives(union) else None
        keys = (*keys, part)
        value = _get(value, part)
        if hint is None:
            break
    return _Place(keys=keys, section=section, hint=hint, value=value, union=union)


def _get(value: Any, part: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(part)
    return value[part] if isinstance(value, list) and isinstance(part, int) else None


def _explain(fault: Mapping[str, Any], tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """One of pydantic's faults as (key, line), in plain words; nothing for an alternative that was not chosen."""
    place = _locate(fault["loc"], tree)
    if place is None:
        return
    key = show_key(place.keys)
    if not key:
        yield key, f"the config cannot be read: {fault['msg'].splitlines()[0]}; write plain text and numbers"
    elif place.hint is None:
        yield key, _explain_unknown(key, place)
    elif fault["type"].startswith("missing"):
        yield key, f"{key} is missing and has no default; write {describe(place.hint)} there"
    elif literal_values(place.hint) and not is_nullable(place.hint):
        yield key, f"{key}={show(place.value)} {_must_be_one_of(place.value, literal_values(place.hint))}"
    else:
        yield key, f"{key}={show(place.value)} must be {describe(place.hint)}; {_remedy(key, place)}"


def _must_be_one_of(value: Any, allowed: Sequence[Any]) -> str:
    close = difflib.get_close_matches(str(value), [str(each) for each in allowed], n=1)
    return f"must be one of {', '.join(map(str, allowed))}; " + (
        f"did you mean {close[0]}?" if close else f"try {allowed[0]}"
    )


def _remedy(key: str, place: _Place) -> str:
    """What to write instead, with an example of the right kind."""
    hint, value, kinds = place.hint, place.value, members(place.hint)
    index = isinstance(place.keys[-1], int)
    default = None if index else field_default(place.section, str(place.keys[-1]))
    if int in kinds:
        example = _as_int(value) or (default if isinstance(default, int) and default else 1)
        return f"write a whole number, e.g. {example}"
    if float in kinds:
        return f"write one, e.g. {_as_float(value) or (default if isinstance(default, float) else 1.0)}"
    if bool in kinds:
        meant = _MEANT.get(str(value).lower())
        return "write one of the two" if meant is None else f"write {show(meant)}"
    if str in kinds:
        scalar = isinstance(value, (int, float)) and not isinstance(value, bool)
        return f"quote it: {key}='\"{value}\"'" if scalar else "write it in quotes"
    if item_hint(hint) is not None:
        return (
            "write a list, e.g. [a, b]"
            if not alternatives(item_hint(hint))
            else "write a list of sections, e.g. [{...}]"
        )
    if len(alternatives(hint)) > 1:
        chosen = choose_alternative(hint, value) or alternatives(hint)[0]
        return f"write {key}.name={alternative_name(chosen)}"
    return "write its keys below it, or leave it out for the defaults"


def _as_int(value: Any) -> int | None:
    number = _as_float(value)
    return int(number) if number is not None and abs(number) < 2**53 and number == int(number) else None


def _as_float(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and math.isfinite(number) else None


def _explain_unknown(key: str, place: _Place) -> str:
    """The line for a key that its section lacks: another alternative's, or the nearest known key."""
    name, parent = str(place.keys[-1]), show_key(place.keys[:-1])
    told = f"{key}={show(place.value)}"
    owners = [each for each in alternatives(place.union) if name in field_hints(each)]
    if owners:
        names = join_or([f"{parent}.name={alternative_name(each)}" for each in owners])
        mine = f"{parent}.name={alternative_name(place.section)}"
        return f"{told} does not belong to {mine}, only to {names}; remove it, or set {names}"
    prefix = f"{parent}." if parent else ""
    if "." in name:
        return f"{told} is not a known key; in YAML, write each part on a line of its own, the next one indented"
    near = difflib.get_close_matches(name, list(field_hints(place.section)), n=1)
    elsewhere = sorted({leaf for leaf in leaf_keys(RunConfig) if leaf.rsplit(".", 1)[-1] == name})
    if near or elsewhere:
        return f"{told} is not a known key; did you mean {join_or([prefix + near[0]] if near else elsewhere[:3])}?"
    known = ", ".join(field_hints(place.section))
    return f"{told} is not a known key; {parent or 'the top level'} has {known}"
