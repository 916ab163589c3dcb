"""The meaning of a source's path, and the input files that it stands for.

A path is a file, a folder, a glob, ``hf://NAME``, or the PREFIX of token files. ``${python_stdlib}`` stands for the
folder of Python's standard library, text that is on every machine with Python.
"""

import glob
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from data.config import SourceConfig
from data.errors import refuse
from data.files import RECURSIVE, find_below, find_matching, keep_files, matches_parts
from data.places import why_no_path
from data.saved import is_saved, saved_paths
from data.tokenfile import is_token_file

HUGGING_FACE = "hf://"
Kind = Literal["text", "jsonl", "jsonl.gz", "jsonl.zst", "parquet", "arrow", "warc"]
ENDINGS: dict[str, Kind] = {  # a file name's ending -> its kind; any other file is text
    "jsonl": "jsonl",
    "jsonl.gz": "jsonl.gz",
    "jsonl.zst": "jsonl.zst",
    "parquet": "parquet",
    "arrow": "arrow",
    "feather": "arrow",
    "ipc": "arrow",
    "warc": "warc",
    "warc.gz": "warc",
    "wet": "warc",
    "wet.gz": "warc",
}


@dataclass(frozen=True)
class InputFile:
    """One file of a corpus."""

    path: str
    n_bytes: int

    @property
    def kind(self) -> Kind:
        """How to read it, from its name."""
        named: list[Kind] = [kind for ending, kind in ENDINGS.items() if self.path.lower().endswith(f".{ending}")]
        return named[0] if named else "text"


def expand_path(path: str) -> str:
    """The path with ``${python_stdlib}`` and ``~`` replaced."""
    return os.path.expanduser(path.replace("${python_stdlib}", sysconfig.get_path("stdlib")))


def readable_stem(path: str) -> str:
    """A short name for a path, made of its last part: letters, digits and dashes, at most 40 characters."""
    parts = [part for part in path.removeprefix(HUGGING_FACE).split("/") if part and "*" not in part]
    letters = (c if c.isalnum() else "-" for c in (parts[-1] if parts else "text"))
    return "-".join(filter(None, "".join(letters).split("-")))[:40] or "text"


def is_hugging_face(source: SourceConfig) -> bool:
    """Whether the source is read through ``datasets``."""
    return source.path.startswith(HUGGING_FACE)


def is_url(path: str) -> bool:
    """Whether a path is a URL of token files, on an object store or anywhere else that fsspec can open."""
    return "://" in path and not path.startswith(HUGGING_FACE)


def reads_files(source: SourceConfig) -> bool:
    """Whether Roundtable itself lists and reads the source's files: it does so for raw sources that are not streamed.

    Hugging Face datasets are streamed by ``datasets``, except those that save_to_disk wrote: lists of Arrow files.
    """
    return is_raw(source) and (not is_hugging_face(source) or is_saved(_dataset_folder(source)))


def _dataset_folder(source: SourceConfig) -> Path:
    return Path(os.path.expanduser(source.path.removeprefix(HUGGING_FACE)))


def is_raw(source: SourceConfig) -> bool:
    """Whether the source is text that has to be prepared, rather than existing token files."""
    return is_hugging_face(source) or not (is_url(source.path) or is_token_file(expand_path(source.path)))


def input_files(source: SourceConfig, key: str) -> list[InputFile]:
    """The source's files, sorted by path: this order fixes the documents' order. ``key`` names the source in errors.

    The source must be one for which ``reads_files`` holds; a saved dataset's files come in its own order. A folder
    stands for every file below it. Hidden files and folders are left out, also from globs. A file with several names
    counts once. Raises DataError where the path is invalid, nothing matches, or something cannot be read as a file.
    """
    rule = why_no_path(source.path)
    if rule is not None:
        raise refuse(f"{key}.path={source.path!r}", rule, "give another path")
    if is_hugging_face(source):
        check_no_exclude(source, key)
        paths = saved_paths(_dataset_folder(source), source.split, f"{key}.path={source.path!r}")
        sizes = dict(keep_files(paths, key, folders_are_wrong=True))
        return [InputFile(path, sizes[path]) for path in dict.fromkeys(paths) if path in sizes]
    path = expand_path(source.path)
    found = _all_named(path)
    names_files = not os.path.isdir(path) and path.rpartition("/")[2] not in ("*", RECURSIVE)
    kept = keep_files((p for p in found if not _excluded(p, source.exclude)), key, folders_are_wrong=names_files)
    if not kept:
        raise refuse(f"{key}.path={source.path!r}", _why_nothing(path, found), "check the path, or give another one")
    return [InputFile(path, n_bytes) for path, n_bytes in kept]


def check_no_exclude(source: SourceConfig, key: str) -> None:
    """Raises DataError where ``exclude`` is set for a Hugging Face dataset, whose files ``datasets`` chooses."""
    if source.exclude:
        rule = f"must be empty for path={source.path!r}, since datasets chooses the files that it reads"
        remedy = "leave it out, or give the folder with the files as path, without hf://"
        raise refuse(f"{key}.exclude={list(source.exclude)}", rule, remedy)


def _all_named(path: str) -> list[str]:
    if os.path.isdir(path):
        return find_below(path)
    return [path] if os.path.lexists(path) else find_matching(path)


def place_within(source: SourceConfig, folder: str | Path, names: Sequence[str]) -> str | None:
    """The folder's path relative to the source, if the source would read any of the files ``names`` in it; else None.

    ``names`` are paths within ``folder``, which need not exist yet. For Hugging Face datasets, which choose their own
    files, it is None.
    """
    path = expand_path(source.path)
    if is_hugging_face(source) or not (os.path.isdir(path) or glob.has_magic(path)):
        return None
    parts = path.rstrip("/").split("/")
    fixed = len(parts) if os.path.isdir(path) else next(i for i, part in enumerate(parts) if glob.has_magic(part))
    base, pattern = "/".join(parts[:fixed]) or ("/" if path.startswith("/") else "."), parts[fixed:] or [RECURSIVE]
    inside = os.path.relpath(os.path.realpath(folder), os.path.realpath(base))
    files = [os.path.normpath(os.path.join(inside, name)) for name in names]
    reads = any(
        matches_parts(file.split("/"), pattern) and not _excluded(os.path.join(base, file), source.exclude)
        for file in files
    )
    return inside if reads else None


def _excluded(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches the path; ``*`` also matches slashes, and ``**/x`` also matches x at the top.

    Both are compared in their shortest form, so ``./a`` and ``a`` are the same.
    """
    path, patterns = os.path.normpath(path), tuple(os.path.normpath(expand_path(each)) for each in patterns)
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
