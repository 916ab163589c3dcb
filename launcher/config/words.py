"""How values and keys are shown in one line of a message."""

import json
from typing import Any

from launcher.config.secrets import mask

_MAX_CHARACTERS = 60


def show(value: Any) -> str:
    """``value`` as it would be typed: 'ten', 3e-4, true, null, [1, 2]. One line, cut where it is long; no secrets."""
    if isinstance(value, str):
        text = repr(value)
    elif value is None or isinstance(value, bool):
        text = json.dumps(value)
    elif isinstance(value, float):
        text = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))
    else:
        text = json.dumps(value, default=str) if isinstance(value, (dict, list, tuple)) else str(value)
    return cut(mask(text))


def cut(text: str) -> str:
    """``text``, or its beginning where it is long."""
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."


def show_key(keys: tuple[str | int, ...]) -> str:
    """The dotted key, e.g. data.sources[0].path; a part that is not plain is quoted, so that it stays on one line."""
    names = [key if isinstance(key, int) else cut(key if key.isprintable() else repr(key)) for key in keys]
    parts = [f"[{name}]" if isinstance(name, int) else f".{name}" for name in names]
    return mask("".join(parts).removeprefix("."))


def join_or(items: list[str]) -> str:
    """The items as text: "a, b or c"."""
    return _join(items, "or")


def join_and(items: list[str]) -> str:
    """The items as text: "a, b and c"."""
    return _join(items, "and")


def _join(items: list[str], word: str) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} {word} {items[-1]}"
