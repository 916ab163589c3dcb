"""Random configs, drawn from the dataclasses' own type hints."""

import types
from typing import Any, get_args, get_origin

from hypothesis import strategies as st

from launcher.config.schema import alternatives, field_hints, item_hint, members
from launcher.config.tree import RunConfig

INTEGERS = st.integers(-2, 12) | st.integers(-(10**12), 10**12)
FLOATS = st.sampled_from([0.0, 1.0, 0.1, 1e-8, -1.0]) | st.floats(allow_nan=False, allow_infinity=False)
TEXTS = st.sampled_from(
    ["no", "1e3", "null", "", "~", "2026-11-20", "a: b # c", "0x10", "- x", "${a}", "\x85", "a\nb "]
) | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def values(hint: Any, integers: st.SearchStrategy[int] = INTEGERS) -> st.SearchStrategy[Any]:
    """Any value that ``hint`` allows, sensible or not, its integers of ``integers``."""
    return st.one_of([_member_values(member, integers) for member in members(hint)])


def _member_values(member: Any, integers: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    plain = {int: integers, float: FLOATS, str: TEXTS, bool: st.booleans(), types.NoneType: st.none()}
    if member in plain:
        return plain[member]
    if alternatives(member):
        return st.builds(member, **{name: values(hint, integers) for name, hint in field_hints(member).items()})
    if item_hint(member) is not None:
        return st.lists(values(item_hint(member), integers), max_size=2).map(tuple)
    assert get_origin(member) is not None, member
    return st.sampled_from(get_args(member))


def configs(integers: st.SearchStrategy[int] = INTEGERS) -> st.SearchStrategy[RunConfig]:
    """Any config of the right types, sensible or not."""
    return values(RunConfig, integers)
