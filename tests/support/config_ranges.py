"""The ranges of the config's numbers by dotted key, and a check that each number has one whole range."""

from collections.abc import Iterator

from launcher.config.ranges import Range, ranges
from launcher.config.schema import alternatives, field_hints, item_hint, members
from launcher.config.tree import RunConfig


def numbers(section: type, prefix: str = "") -> Iterator[tuple[str, Range | None]]:
    """(dotted key, range or None where it has none) of each number of ``section`` and below, of every alternative."""
    for name, hint in field_hints(section).items():
        inner = item_hint(hint) or hint
        if {int, float} & set(members(inner)):
            yield prefix + name, ranges(section).get(name)
        for alternative in alternatives(inner):
            yield from numbers(alternative, f"{prefix}{name}.")


def range_faults(section: type) -> list[str]:
    """A line for each number of ``section`` and below without a whole range, or with two of them."""
    found, faults = {}, []
    for key, limits in numbers(section):
        if limits is None or None in (limits.minimum, limits.maximum, limits.usual):
            faults.append(f"{key} lacks a bound, or what to try outside: its range is {limits}")
        elif not limits.minimum <= limits.usual <= limits.maximum < float("inf"):
            faults.append(f"{key} has the range {limits}")
        elif found.setdefault(key, limits) != limits:
            faults.append(f"{key} is {found[key]} in one alternative and {limits} in another")
    return faults


RANGES: dict[str, Range] = {key: limits for key, limits in numbers(RunConfig) if limits is not None}
