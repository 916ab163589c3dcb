"""Atomic and durable files: written under a temporary name, synced to disk and renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from data.refusals import refusals_of


def partial_suffix() -> str:
    """The ending of the temporary name of a file that this process is still writing."""
    return f"partial-{os.uname().nodename}-{os.getpid()}"


def is_partial(path: Path) -> bool:
    """Whether the path is an unfinished folder that ``launcher.new_folder`` is making, or was making when killed."""
    return path.name.startswith(".") and ".partial-" in path.name


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A context with a file open for writing that becomes ``path``, durably, at the end, or is deleted on an error.

    with written_whole(folder / "a.json") as file:
        file.write(content)
    """
    partial = path.with_name(f"{path.name}.{partial_suffix()}")
    try:
        with refusals_of(path), partial.open("wb") as file:
            yield file
        move_into_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def move_into_place(written: Path, path: Path) -> None:
    """Renames a written file to ``path``, atomically and durably; creates the folder if needed."""
    path.parent.mkdir(exist_ok=True)
    _sync(written)
    written.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames within ``folder`` durable."""
    _sync(folder)


def sync_all(folder: Path) -> None:
    """Makes the folder and all files and folders below it durable; links are not followed."""
    for above, _, files in os.walk(folder):
        paths = (Path(above, name) for name in files)
        for path in (*paths, Path(above)):
            if not path.is_symlink():
                _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
