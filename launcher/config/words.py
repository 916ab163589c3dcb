"""How values and keys are shown in one line of a message."""

import json
from typing import Any

_MAX_CHARACTERS = 60


def show(value: Any) -> str:
    """``value`` as it would be typed, on one line, cut where it is long: 'ten', 3e-4, true, null, [1, 2]."""
    if isinstance(value, str):
        text = repr(value)
    elif value is None or isinstance(value, bool):
        text = json.dumps(value)
    elif isinstance(value, float):
        text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    else:
        text = json.dumps(value, default=str) if isinstance(value, (dict, list, tuple)) else str(value)
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."


def show_key(keys: tuple[str | int, ...]) -> str:
    """The dotted key, e.g. data.sources[0].path; a part that is not plain is quoted, so that it stays on one line."""
    parts = [f"[{key}]" if isinstance(key, int) else f".{key if key.isprintable() else repr(key)}" for key in keys]
    return "".join(parts).removeprefix(".")


def join_or(items: list[str]) -> str:
    """``a, b or c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} or {items[-1]}"
