"""The interface of checkpoint stores: folders of files, and the operations that commit, set aside and remove them.

There are two kinds: a file system (local.py), where a rename commits, and an object store (objects.py), where writing
the manifest does. places.py opens either by its path or URL.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from parallel.checkpoint.regular import UnfitFile

MANIFEST = "manifest.json"
OWNER = ".owner.json"  # a record beside the checkpoints of the run to which they belong
MOST_OWNER = 1 << 16  # bytes of that record
MOST_DIGITS = 18  # of a step's number

Item = TypeVar("Item")


class Output(Protocol):
    """A file being written, as a context manager: durable when it is left, discarded if an exception leaves it."""

    def write(self, data: Any) -> None:
        """Appends all bytes of a buffer."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Input(Protocol):
    """A file being read, as a context manager."""

    def seek(self, offset: int, /) -> Any:
        """Moves to byte ``offset``, where the next read begins."""
        ...

    def readinto(self, buffer: Any, /) -> int | None:
        """Reads into the buffer, which one read may fill only in part; returns the number of bytes, 0 at the end."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Folder(Protocol):
    """The files of one checkpoint. All errors are OSErrors; a missing file raises FileNotFoundError."""

    name: str
    location: str  # the path or URL that a user would type

    def path(self, file: str) -> str:
        """The file's path or URL, for messages."""
        ...

    def size(self, file: str) -> int | None:
        """The file's size in bytes; None where it is missing. Raises UnfitFile for a link, a folder, a pipe, ..."""
        ...

    def stamp(self, file: str) -> Any:
        """A value that changes when the file is written to or replaced. Raises FileNotFoundError and UnfitFile."""
        ...

    def read_bytes(self, file: str, most: int) -> bytes:
        """The whole content of a small file. Raises UnfitFile also where it has more than ``most`` bytes."""
        ...

    def open(self, file: str) -> Input:
        """The file, opened for reading in pieces. Raises UnfitFile where it is a link, a folder, a pipe, ..."""
        ...

    def create(self, file: str) -> Output:
        """A new file, opened for writing in pieces; folders in its name are made."""
        ...

    def files(self) -> list[str]:
        """The paths, from this folder, of everything below it except folders, sorted; links are not followed."""
        ...


class Store(Protocol):
    """A place that holds checkpoints by name: step-00000100 and so on.

    An attempt is one try at writing a checkpoint, under a tag that no other attempt in this place has; nothing of it is
    visible before the commit. Only one rank may commit, discard, set aside, remove and sweep.
    """

    location: str

    def folder(self, name: str) -> Folder:
        """The folder of the checkpoint of this name, whether it exists or not."""
        ...

    def names(self) -> list[str]:
        """The names of the committed checkpoints, in the order of their steps, without those set aside."""
        ...

    def owner(self) -> bytes | None:
        """The record of the run that keeps its checkpoints here, as ``own`` wrote it; None where there is none."""
        ...

    def own(self, content: bytes, *, instead: bool) -> bool:
        """Writes the owner's record in one atomic act. ``instead``: replaces a record that is there.

        Returns False where ``instead`` is False and another process has written a record already.
        """
        ...

    def begin(self, name: str, attempt: str) -> tuple[Folder, str]:
        """The folder to which an attempt writes, and the prefix of its files' names there. Every rank may call it."""
        ...

    def commit(self, name: str, attempt: str, manifest: bytes) -> None:
        """Writes the manifest, and in one atomic act makes the attempt the checkpoint of this name."""
        ...

    def discard(self, name: str, attempt: str) -> None:
        """Removes what the attempt wrote."""
        ...

    def set_aside(self, name: str) -> str:
        """Takes a damaged checkpoint out of the list without deleting its files; returns where they are."""
        ...

    def remove(self, name: str) -> None:
        """Deletes a checkpoint. If that is interrupted, the rest is no checkpoint, and ``sweep`` removes it."""
        ...

    def set_aside_ones(self) -> list[Folder]:
        """The checkpoints that were set aside as damaged."""
        ...

    def leftovers(self) -> list[Folder]:
        """The folders of attempts and removals that were interrupted, or are still under way."""
        ...

    def sweep(self) -> list[str]:
        """Removes the leftovers; returns their names. No attempt may be under way. Raises OSError where some stay."""
        ...


def try_each(act: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Calls ``act`` on each item, also after failures; then raises all their OSErrors as one, in one line."""
    failures = []
    for item in items:
        try:
            act(item)
        except OSError as error:
            failures.append(str(error))
    if failures:
        raise OSError("; ".join(failures))


def step_name(step: int) -> str:
    """The name of the checkpoint after update ``step``."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's name; None for any other name."""
    digits = name.removeprefix("step-")
    is_number = digits.isascii() and digits.isdecimal() and len(digits) <= MOST_DIGITS
    return int(digits) if digits != name and is_number else None


def in_order(names: Sequence[str]) -> list[str]:
    """Those of the names that are checkpoints' names, in the order of their steps."""
    return sorted((name for name in names if step_of(name) is not None), key=lambda name: step_of(name) or 0)


def at_most(content: bytes, most: int) -> bytes:
    """The content; raises UnfitFile where it is longer than ``most`` bytes."""
    if len(content) > most:
        raise UnfitFile(f"has more than the {most} bytes that such a file may have")
    return content
