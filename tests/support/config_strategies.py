"""Random configs, drawn from the dataclasses' own type hints."""

import math
import types
from typing import Any, get_args, get_origin

from hypothesis import strategies as st

from launcher.config.ranges import Range, ranges
from launcher.config.schema import alternatives, field_hints, item_hint, members
from launcher.config.tree import RunConfig

INTEGERS = st.integers(-2, 12) | st.integers(-(10**12), 10**12)
FLOATS = st.sampled_from([0.0, 1.0, 0.1, 1e-8, -1.0]) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.sampled_from(
    ["no", "1e3", "null", "", "~", "2026-11-20", "a: b # c", "0x10", "- x", "${a}", "\x85", "a\nb "]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def values(hint: Any, integers: st.SearchStrategy[int] = INTEGERS) -> st.SearchStrategy[Any]:
    """Any value that the type hint allows, sensible or not; integers are drawn from ``integers``."""
    return st.one_of([_member_values(member, integers) for member in members(hint)])


def _member_values(member: Any, integers: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    plain = {int: integers, float: FLOATS, str: TEXTS, bool: st.booleans(), types.NoneType: st.none()}
    if member in plain:
        return plain[member]
    if alternatives(member):
        return st.builds(member, **{name: _field(member, name, integers) for name in field_hints(member)})
    if item_hint(member) is not None:
        return st.lists(values(item_hint(member), integers), max_size=2).map(tuple)
    assert get_origin(member) is not None, member
    return st.sampled_from(get_args(member))


def _field(section: type, name: str, integers: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    """Any value of a field; numbers are often at the ends of their range or just outside."""
    limits = ranges(section).get(name)
    return values(field_hints(section)[name], integers | _ends(limits) if limits and integers is INTEGERS else integers)


def _ends(limits: Range) -> st.SearchStrategy[int]:
    least, most = math.ceil(limits.minimum), math.floor(limits.maximum)
    return st.sampled_from([least - 1, least, most, most + 1])


def configs(integers: st.SearchStrategy[int] = INTEGERS) -> st.SearchStrategy[RunConfig]:
    """Any config whose values have the right types, sensible or not."""
    return values(RunConfig, integers)
