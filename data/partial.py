"""Files that are there whole or not at all: written under another name, synced, and renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from data.refusals import refusals_of


def partial_suffix() -> str:
    """Ends the name of a file that this process is still writing."""
    return f"partial-{os.uname().nodename}-{os.getpid()}"


def is_partial(path: Path) -> bool:
    """Whether it is a folder that some process still makes, or was killed while it made it (`launcher.new_folder`)."""
    return path.name.startswith(".") and ".partial-" in path.name


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that is ``path``, durably, when the block ends, and is gone where it fails.

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
    """Gives a file that is written its name, in one act and durably; its folder is made, if need be."""
    path.parent.mkdir(exist_ok=True)
    with written.open("rb") as file:
        os.fsync(file.fileno())
    written.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames within ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
