"""Makes hostile inputs from valid ones: changes bytes at random places, and values within JSON trees.

All draws come from the generator that is passed in, so its seed determines the input.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

TOKENS = [  # pieces of text that parsers often mishandle
    *(
        b"\0",
        b"\n",
        b"\r\n",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\x1b[2J",
        b"[red]",
        b"\xc3",
        "\u202e".encode(),
        b"\\u0000",
    ),
    *(
        b"{" * 300,
        b"[" * 300,
        b"]" * 300,
        b"- " * 300,
        b"&a [*a, *a]",
        b"!!python/object:os.system",
        b"<<: *a",
        b"${HOME}",
    ),
    *(b"../", b"/etc/passwd", b"~", b"file:///", b"NaN", b"-Infinity", b"1e999", b"-1", b"9" * 40, b"null", b"true"),
]
INTEGERS = [0, 1, -1, 2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**62, 2**63 - 1, -(2**63)]
VALUES: list[Any] = [  # values to put in place of a JSON value
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2**31,
        2**63,
        10**18,
        10**30,
        -(10**30),
        0.5,
        1e308,
        -0.0,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        " ",
        "\0",
        "\x1b[2J",
        "[red]x[/red]",
        "..",
        "../../x",
        "/etc/passwd",
        "a" * 300,
        "\ud800",
        "\u202eabc",
        "1",
        "NaN",
    ),
    *([], {}, [[]], [None], {"": None}, {"a": {"b": {"c": []}}}, ["x"] * 50, list(range(50))),
]


def mutate(draw: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One hostile input: one of ``seeds`` with one to four faults in its bytes or, where it is JSON, in its tree."""
    data = draw.choice(seeds)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 4))):
        tree = parsed(data)
        if tree is not None and draw.random() < 0.7:
            data = json.dumps(mutate_tree(draw, tree)).encode()
        else:
            data = draw.choice(BYTE_FAULTS)(draw, data, seeds)
    return data


def parsed(data: bytes) -> dict | list | None:
    """The JSON object or array that the bytes are, or None."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict | list) else None


def mutate_tree(draw: random.Random, tree: Any) -> Any:
    """The tree, changed in place at one of its nodes, each as likely as any; a tree without nodes is replaced."""
    places = list(places_of(tree))
    if not places:
        return draw.choice(VALUES)
    holder, key = draw.choice(places)
    kind = draw.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        holder[key] = wrapped(draw.choice((3, 50, 200)), holder[key])
    elif kind == 2 and isinstance(holder, dict):
        holder[draw.choice([value for value in VALUES if isinstance(value, str)])] = holder.pop(key)
    elif kind == 2:
        holder.append(holder[key])
    elif kind == 3:  # another node's value
        other, other_key = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[other_key]))
    else:
        holder[key] = draw.choice(VALUES)
    return tree


def wrapped(depth: int, value: Any) -> Any:
    """The value nested in ``depth`` lists."""
    for _ in range(depth):
        value = [value]
    return value


def places_of(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each node below the root, as the container that holds it and its key there."""
    waiting = [tree]
    while waiting:
        holder = waiting.pop()
        for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
            yield holder, key
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])


def flip(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Flips one bit."""
    if not data:
        return b"\x01"
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]


def cut(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Cuts off the end at a random place."""
    return data[: draw.randrange(len(data) + 1)]


def remove(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Removes a stretch of bytes."""
    start, end = stretch(draw, data)
    return data[:start] + data[end:]


def repeat(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Repeats a stretch of bytes."""
    start, end = stretch(draw, data)
    return data[:end] + data[start:end] * draw.choice((1, 2, 50)) + data[end:]


def insert(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Inserts one of TOKENS."""
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(TOKENS) + data[at:]


def number(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Overwrites a binary number with another, often an extreme one."""
    width = draw.choice((1, 2, 4, 8))
    at = draw.randrange(max(1, len(data) - width + 1))
    value = draw.choice((*INTEGERS, draw.getrandbits(64))) % 2 ** (8 * width)
    return data[:at] + value.to_bytes(width, "little") + data[at + width :]


def noise(draw: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Overwrites a stretch with random bytes."""
    start, end = stretch(draw, data)
    return data[:start] + draw.randbytes(end - start) + data[end:]


def splice(draw: random.Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Joins the beginning of ``data`` and the end of another seed."""
    other = draw.choice(seeds)
    return data[: draw.randrange(len(data) + 1)] + other[draw.randrange(len(other) + 1) :]


def stretch(draw: random.Random, data: bytes) -> tuple[int, int]:
    """The start and end of a random stretch of at most 64 bytes."""
    start = draw.randrange(len(data) + 1)
    return start, min(len(data), start + draw.randint(1, 64))


BYTE_FAULTS: list[Callable[[random.Random, bytes, Sequence[bytes]], bytes]] = [
    *(flip, cut, remove, repeat, insert, number, noise, splice)
]
