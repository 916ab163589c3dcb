"""Values of a config.json: checked against the types of config fields, and shown in messages."""

import json
import types
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

MOST_SHOWN = 60  # characters of a value that a message shows
hints_of = cache(get_type_hints)  # of a dataclass: field -> type


def checked(value: Any, hint: Any) -> Any:
    """``value`` if it is of the type ``hint``, with an integer turned into a float if need be; otherwise ValueError."""
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError("it must be a list")
        return tuple(checked(each, get_args(hint)[0]) for each in value)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(f"it must be one of {', '.join(get_args(hint))}")
        return value
    members = get_args(hint) or (hint,)
    if type(value) is int and int not in members and float in members:
        try:
            return float(value)
        except OverflowError:
            raise ValueError("it must be a number that a float can hold") from None
    if type(value) not in members:
        names = " or ".join("null" if member is types.NoneType else member.__name__ for member in members)
        raise ValueError(f"it must be {names}")
    return value


def shown(value: Any) -> str:
    """``value`` as JSON on one line, shortened if it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."
