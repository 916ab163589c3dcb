"""Checks of paths: whether a path is valid, and whether a folder exists or could be created, and is writable."""

import os
import re
import sys
from pathlib import Path

LONGEST_NAME = 255  # bytes, of a file or folder, on every usual file system
ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*:)/(?!/)")  # file:/x, which libraries of URLs take for file:///x


def why_no_path(path: str, *, created: bool = False) -> str | None:
    """The rule that ``path`` breaks as a path, whether or not it exists; None where it breaks none.

    ``created``: Roundtable creates this folder, so that a variable that was not expanded, or a URL that lacks a slash,
    would become its name.
    """
    if not path:
        return "must not be empty"
    if "\0" in path:
        return "must not hold a NUL byte"
    if created and "$" in path:
        return "must be written out, since variables are not expanded in a config"
    if created and (scheme := ONE_SLASH.match(path)) is not None:
        begins = f"{scheme[1]}// begins a URL, ./{scheme[1]} a folder's name"
        return f"must not begin like a URL that lacks a slash ({begins})"
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        return f"must be letters that this locale's encoding ({encoding}) knows, as all are under LC_ALL=C.UTF-8"
    longest = max(len(name.encode(errors="replace")) for name in path.split("/"))
    return f"must have names of at most {LONGEST_NAME} bytes, and one has {longest}" if longest > LONGEST_NAME else None


def is_text(path: str | Path) -> bool:
    """Whether a path's bytes are UTF-8, as libraries in other languages need them."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def is_same_place(path: str | Path, other: str | Path) -> bool:
    """Whether both paths lead to the same file or folder; false where one is missing or inaccessible."""
    try:
        return os.path.samefile(path, other)
    except OSError:
        return False


def nearest_existing(path: str | Path) -> str:
    """The absolute path, or the nearest folder above it that exists; a broken link counts as existing."""
    nearest = os.path.abspath(path)
    while True:
        try:
            os.lstat(nearest)
        except (FileNotFoundError, NotADirectoryError):
            nearest = os.path.dirname(nearest)
        else:
            return nearest


def why_not_writable(path: str | Path) -> str | None:
    """The rule that ``path`` breaks as a folder for new files; None where it breaks none. Changes nothing."""
    rule = "must be a folder that can be written to, but"
    parts = Path(path).parts
    for number, part in enumerate(parts):
        if part == ".." and not (through := Path(*parts[:number])).is_dir():
            return f"must not lead through {through} and back (..), which is no folder"
    try:
        nearest = nearest_existing(path)
    except OSError as error:
        return f"{rule} {path} cannot be looked at ({error.strerror})"
    return None if os.path.isdir(nearest) and os.access(nearest, os.W_OK) else f"{rule} {nearest} is not"
