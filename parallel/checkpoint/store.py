"""What a place for checkpoints is: folders of files, and the acts that make a folder a checkpoint or take it away.

One interface, two kinds: a file system (local.py), where the commit is a rename, and an object store (objects.py),
where it is the put of the manifest. places.py opens either by its path or URL.
"""

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from parallel.checkpoint.regular import UnfitFile

MANIFEST = "manifest.json"
OWNER = ".owner.json"  # beside the checkpoints: whose they are
MOST_OWNER = 1 << 16  # bytes of it
MOST_DIGITS = 18  # of a step's number

Item = TypeVar("Item")


class Output(Protocol):
    """A file being written, a context manager: durable when it is left, dropped when it is left by an exception."""

    def write(self, data: Any) -> None:
        """Appends all bytes of a buffer."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Input(Protocol):
    """A file being read, a context manager."""

    def seek(self, offset: int, /) -> Any:
        """The next read begins at this byte."""
        ...

    def readinto(self, buffer: Any, /) -> int | None:
        """Fills the buffer as far as one read goes; the bytes read, 0 at the end."""
        ...

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Folder(Protocol):
    """The files of one checkpoint. What goes wrong is an OSError; a missing file is FileNotFoundError."""

    name: str
    location: str  # what a user would type

    def path(self, file: str) -> str:
        """Where the file lies, for messages."""
        ...

    def size(self, file: str) -> int | None:
        """Its bytes, or None where it is missing. Raises UnfitFile where it is a link, a folder, a pipe, ..."""
        ...

    def stamp(self, file: str) -> Any:
        """A value that changes when the file is written to or replaced. Raises as ``open``."""
        ...

    def read_bytes(self, file: str, most: int) -> bytes:
        """The whole content, for small files. Raises UnfitFile as well where it has more than ``most`` bytes."""
        ...

    def open(self, file: str) -> Input:
        """For reading in pieces. Raises UnfitFile where it is a link, a folder, a pipe, ..."""
        ...

    def create(self, file: str) -> Output:
        """A new file, opened for writing in pieces; folders in its name are made."""
        ...

    def files(self) -> list[str]:
        """All that is below but folders, with paths from here, sorted; links are not followed."""
        ...


class Store(Protocol):
    """A place that holds checkpoints by name: step-00000100 and so on.

    An attempt is one try at writing one, its tag unlike all others' in this place; nothing of it is visible before the
    commit. One rank commits, discards, sets aside, removes and sweeps.
    """

    location: str

    def folder(self, name: str) -> Folder:
        """The checkpoint of this name, there or not."""
        ...

    def names(self) -> list[str]:
        """The checkpoints that were committed, in the order of their steps; neither damaged ones nor attempts."""
        ...

    def owner(self) -> bytes | None:
        """What the run that keeps its checkpoints here has written of itself."""
        ...

    def own(self, content: bytes, *, instead: bool) -> bool:
        """Writes that, in one act. ``instead``: of what is there; else False where somebody has done so already."""
        ...

    def begin(self, name: str, attempt: str) -> tuple[Folder, str]:
        """The folder that an attempt writes to, and what precedes its files' names. Every rank may call it."""
        ...

    def commit(self, name: str, attempt: str, manifest: bytes) -> None:
        """Writes the manifest and makes the attempt the checkpoint, in one atomic act."""
        ...

    def discard(self, name: str, attempt: str) -> None:
        """Removes what the attempt wrote."""
        ...

    def set_aside(self, name: str) -> str:
        """Makes a damaged checkpoint one no longer, keeping its files; returns where they are."""
        ...

    def remove(self, name: str) -> None:
        """Deletes a checkpoint; cut short, it leaves something that ``sweep`` removes, never half a checkpoint."""
        ...

    def set_aside_ones(self) -> list[Folder]:
        """The checkpoints that were set aside as damaged."""
        ...

    def leftovers(self) -> list[Folder]:
        """What attempts and removals left that were cut short, or are writing now."""
        ...

    def sweep(self) -> list[str]:
        """Removes the leftovers; returns their names. No attempt may be under way. Raises OSError where some stay."""
        ...


def try_each(act: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Acts on each item, past those that fail; then raises their OSErrors as one, in one line."""
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
    """Which of the names are checkpoints', by step."""
    return sorted((name for name in names if step_of(name) is not None), key=lambda name: step_of(name) or 0)


def at_most(content: bytes, most: int) -> bytes:
    """The content; raises UnfitFile where it is longer than ``most`` bytes."""
    if len(content) > most:
        raise UnfitFile(f"has more than the {most} bytes that such a file may have")
    return content
