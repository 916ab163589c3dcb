"""The legal range of each number of the config, read from its type, ``Annotated[int, Interval(ge=1, le=9)]``."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from annotated_types import Interval

from launcher.config.schema import alternatives, field_default, field_hints, is_nullable, item_hint
from launcher.config.tree import RunConfig
from launcher.config.words import show


@dataclass(frozen=True)
class Range:
    """The smallest and the largest legal value, and one to try instead of an illegal one."""

    minimum: float
    maximum: float
    usual: float


@cache
def ranges(section: type) -> dict[str, Range]:
    """The range of each field of dataclass ``section`` that holds a number, or a list of them.

    ``usual`` is the default, or ``usual`` of the field's metadata, given where the default is null or no good remedy.
    """
    hints = get_type_hints(section, include_extras=True)
    found = {}
    for field in dataclasses.fields(section):
        interval: Any = _interval(hints[field.name])  # Any: Interval types its bounds as anything that can be compared
        if interval is not None:
            usual = field.metadata.get("usual", field_default(section, field.name))
            found[field.name] = Range(interval.ge, interval.le, usual)
    return found


def _interval(hint: Any) -> Interval | None:
    """The interval in a type, however deep, as in ``tuple[Annotated[int, Interval(ge=1, le=9)], ...] | None``."""
    if isinstance(hint, Interval):
        return hint
    found = map(_interval, (*get_args(hint), *getattr(hint, "__metadata__", ())))
    return next((interval for interval in found if interval is not None), None)


def range_problems(config: RunConfig) -> Iterator[str]:
    """One line for each number outside its range."""
    for shown, value, limits, nullable in _numbers(config):
        remedy = f"try {limits.usual} or null" if nullable else f"try {limits.usual}"
        if value < limits.minimum:
            yield f"{shown}={show(value)} must be at least {limits.minimum}; {remedy}"
        elif value > limits.maximum:
            yield f"{shown}={show(value)} must be at most {limits.maximum}; {remedy}"


def is_beyond(config: RunConfig) -> bool:
    """Whether any number is above its range; the rules between values may then overflow or take for ever."""
    return any(value > limits.maximum for _, value, limits, _ in _numbers(config))


def _numbers(section: Any, prefix: str = "") -> Iterator[tuple[str, float, Range, bool]]:
    """Each number of ``section`` and below: its key as it is shown, value and range, and whether null is allowed."""
    for name, limits, nullable in _holders(type(section)):
        value = getattr(section, name)
        items = (
            [(f"[{index}]", item) for index, item in enumerate(value)] if isinstance(value, tuple) else [("", value)]
        )
        for index, item in items:
            if dataclasses.is_dataclass(item):
                yield from _numbers(item, f"{prefix}{name}{index}.")
            elif limits is not None and item is not None:
                yield f"{prefix}{name}{index}", item, limits, nullable


@cache
def _holders(section: type) -> list[tuple[str, Range | None, bool]]:
    """(name, range, whether null is allowed) of each field of ``section`` that holds numbers, or sections of them."""
    limits = ranges(section)
    return [
        (name, limits.get(name), is_nullable(hint))
        for name, hint in field_hints(section).items()
        if name in limits or alternatives(item_hint(hint) or hint)
    ]
