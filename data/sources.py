"""What a source's path means, and which files it stands for.

A path is a file, a folder, a glob, ``hf://NAME``, or the PREFIX of token files. ``${python_stdlib}`` stands for the
folder of Python's standard library, text that is on every machine with Python.
"""

import glob
import os
import sysconfig
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from data.config import SourceConfig
from data.errors import refuse
from data.tokenfile import is_token_file

HUGGING_FACE = "hf://"
Kind = Literal["text", "jsonl", "jsonl.gz", "jsonl.zst", "parquet"]
KINDS: tuple[Kind, ...] = ("jsonl", "jsonl.gz", "jsonl.zst", "parquet")  # by the end of the name; all else is text


@dataclass(frozen=True)
class InputFile:
    """One file of a corpus."""

    path: str
    n_bytes: int

    @property
    def kind(self) -> Kind:
        """How to read it, from its name."""
        named: list[Kind] = [kind for kind in KINDS if self.path.lower().endswith(f".{kind}")]
        return named[0] if named else "text"


def expand_path(path: str) -> str:
    """The path with ``${python_stdlib}`` and ``~`` filled in."""
    return os.path.expanduser(path.replace("${python_stdlib}", sysconfig.get_path("stdlib")))


def is_hugging_face(source: SourceConfig) -> bool:
    """Whether the source is read through ``datasets``."""
    return source.path.startswith(HUGGING_FACE)


def is_raw(source: SourceConfig) -> bool:
    """Whether the source is text that has to be prepared, and not the prefix of token files."""
    return is_hugging_face(source) or not is_token_file(expand_path(source.path))


def input_files(source: SourceConfig, key: str) -> list[InputFile]:
    """The source's files, sorted by path: this order fixes the documents' order. ``key`` names the source in errors.

    A folder stands for every file below it; hidden files and folders are left out, of globs too. Raises DataError
    where nothing matches.
    """
    path = expand_path(source.path)
    if os.path.isfile(path):
        found = [path]
    elif os.path.isdir(path):
        found = glob.glob(os.path.join(glob.escape(path), "**"), recursive=True)
    else:
        found = glob.glob(path, recursive=True)
    kept = sorted({p for p in found if os.path.isfile(p) and not _excluded(p, source.exclude)})
    if not kept:
        raise refuse(f"{key}.path={source.path!r}", _why_nothing(path, found), "check the path, or give another one")
    return [InputFile(path, os.stat(path).st_size) for path in kept]


def _excluded(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches the path; ``*`` also matches slashes, and ``**/x`` also matches x at the top."""
    anchored = path if path.startswith("/") else f"/{path}"
    return any(fnmatchcase(path, pattern) or fnmatchcase(anchored, pattern) for pattern in patterns)


def _why_nothing(path: str, found: list[str]) -> str:
    if any(os.path.isfile(p) for p in found):
        return "matches only files that data.sources' exclude leaves out"
    if os.path.isdir(path):
        return "is a folder without files"
    halves = [str(Path(f"{path}{end}")) for end in (".bin", ".idx") if os.path.isfile(f"{path}{end}")]
    if halves:
        return f"needs both PREFIX.bin and PREFIX.idx but only {halves[0]} exists"
    return "matches no file" if glob.has_magic(path) else "does not exist"
