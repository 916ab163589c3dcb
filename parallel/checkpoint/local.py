"""Checkpoints on a file system: a rename commits, and large writes bypass the page cache (O_DIRECT)."""

import ctypes
import errno
import fcntl
import io
import os
import shutil
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from parallel.checkpoint.regular import look, open_regular
from parallel.checkpoint.store import MANIFEST, MOST_OWNER, OWNER, Folder, Input, Output, at_most, in_order, try_each

BLOCK_BYTES = 4096  # writes that bypass the page cache begin and end at multiples of this, in memory and on disk
SMALLEST_DIRECT = 1 << 20  # bytes of a write; smaller ones go through the page cache
NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)
AHEAD_BYTES = 16 << 20  # how far ahead of a reader the disk is asked to read
AT_FDCWD = -100  # of Linux's renameat2: paths are relative to the current folder
RENAME_EXCHANGE = 2  # of the same: each of the two names gets the other's file


class LocalOutput:
    """A file being written; a context manager that syncs the file to disk when it is left.

    Large aligned chunks bypass the page cache (O_DIRECT) where the file system supports it: that takes hardly any CPU
    time, and leaves the cache to the token files.
    """

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self.written = 0
        self.can_direct = hasattr(os, "O_DIRECT")
        self.is_direct = False

    def write(self, data: Any) -> None:
        """Appends all bytes of a buffer."""
        view = memoryview(data).cast("B")
        while len(view):
            blocks = self._whole_blocks(view)
            self._switch(blocks > 0)
            try:
                done = os.write(self.handle, view[:blocks] if self.is_direct else view)
            except OSError as error:
                if not (self.is_direct and error.errno == errno.EINVAL):
                    raise
                self.can_direct = False  # the file system needs larger blocks, or reports only now that it cannot
                continue
            self.written += done
            view = view[done:]

    def _whole_blocks(self, view: memoryview) -> int:
        """How many bytes, from the first on, can bypass the page cache; 0 where that is impossible or not worth it."""
        if not self.can_direct or len(view) < SMALLEST_DIRECT or self.written % BLOCK_BYTES:
            return 0
        address = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return 0 if address % BLOCK_BYTES else len(view) // BLOCK_BYTES * BLOCK_BYTES

    def _switch(self, direct: bool) -> None:
        """Makes later writes bypass the page cache (``direct``), or go through it."""
        if direct == self.is_direct:
            return
        flags = fcntl.fcntl(self.handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.handle, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        except OSError:
            self.can_direct = False
            return
        self.is_direct = direct

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.fsync(self.handle)
        finally:
            os.close(self.handle)


class LocalInput(io.FileIO):
    """A file being read without Python's buffering; the kernel is asked to read ahead while the data are used."""

    asked_until = 0  # the kernel was asked to read ahead up to this byte

    def __init__(self, folder: Path, file: str) -> None:
        super().__init__(open_regular(folder, file))

    def readinto(self, buffer: Any, /) -> int | None:
        """Reads into the buffer, which one read may fill only in part; returns the number of bytes, 0 at the end."""
        got = super().readinto(buffer)
        if hasattr(os, "posix_fadvise"):  # not on macOS
            position = self.tell()
            if abs(self.asked_until - position - AHEAD_BYTES) > AHEAD_BYTES // 2:
                os.posix_fadvise(self.fileno(), position, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
                self.asked_until = position + AHEAD_BYTES
        return got


class LocalFolder:
    """One checkpoint's files, in a directory of a file system."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.name = directory.name
        self.location = str(directory)

    def __str__(self) -> str:
        return self.location

    def path(self, file: str) -> str:
        """The file's path."""
        return str(self.directory / file)

    def size(self, file: str) -> int | None:
        """The file's size in bytes; None where it is missing. Raises UnfitFile where it is no regular file."""
        try:
            return look(self.directory, file).st_size
        except FileNotFoundError:
            return None

    def stamp(self, file: str) -> tuple[int, int, int]:
        """The file's inode, size and time of its last write."""
        found = look(self.directory, file)
        return found.st_ino, found.st_size, found.st_mtime_ns

    def read_bytes(self, file: str, most: int) -> bytes:
        """The file's whole content. Raises UnfitFile where it has more than ``most`` bytes."""
        with io.BufferedReader(LocalInput(self.directory, file)) as content:
            return at_most(content.read(most + 1), most)

    def open(self, file: str) -> Input:
        """The file, opened for reading without Python's buffering."""
        return LocalInput(self.directory, file)

    def create(self, file: str) -> Output:
        """A new file, opened for writing; folders in its name are made."""
        path = self.directory / file
        if "/" in file:
            path.parent.mkdir(parents=True, exist_ok=True)
        return LocalOutput(path)

    def files(self) -> list[str]:
        """The names of all files, links and pipes in the folder and below, sorted."""
        found = []
        for folder, folders, files in os.walk(self.directory):
            links = (name for name in folders if os.path.islink(os.path.join(folder, name)))
            found += [Path(folder, name).relative_to(self.directory).as_posix() for name in (*files, *links)]
        return sorted(found)


class LocalStore:
    """A store that holds each checkpoint as a directory below ``root``.

    Hidden names ending in .partial are attempts and removals that have not ended.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.location = str(root)

    def folder(self, name: str) -> LocalFolder:
        """The checkpoint of this name."""
        return LocalFolder(self.root / name)

    def names(self) -> list[str]:
        """The names of the checkpoints, in the order of their steps; empty where the directory cannot be read.

        The directory is listed once, since between two listings one checkpoint may appear and another be deleted.
        """
        try:
            with os.scandir(self.root) as entries:
                return in_order([entry.name for entry in entries if entry.is_dir()])
        except ValueError:  # an impossible path
            return []
        except OSError as error:
            if error.errno not in NO_FOLDER:
                raise
            return []

    def owner(self) -> bytes | None:
        """The owner's record, a hidden file beside the checkpoints; None where there is none."""
        try:
            return LocalFolder(self.root).read_bytes(OWNER, MOST_OWNER)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def own(self, content: bytes, *, instead: bool) -> bool:
        """Writes the owner's record atomically; without ``instead``, only if there is none. Returns whether it did.

        With ``instead`` the complete file is renamed; else a hard link is made to it, which fails if there is one.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = f"{OWNER}.{uuid.uuid4().hex}.partial"
        path = self.root / temporary
        try:
            with LocalFolder(self.root).create(temporary) as out:
                out.write(content)
            if instead:
                path.replace(self.root / OWNER)
                return True
            return _linked(path, self.root / OWNER)
        finally:
            path.unlink(missing_ok=True)

    def begin(self, name: str, attempt: str) -> tuple[LocalFolder, str]:
        """The attempt's folder, a hidden directory beside the checkpoints, which is made; its files have no prefix."""
        partial = self._partial(name, attempt)
        partial.mkdir(parents=True, exist_ok=True)
        return LocalFolder(partial), ""

    def commit(self, name: str, attempt: str, manifest: bytes) -> None:
        """Writes the manifest and renames the attempt's directory to the checkpoint's name; both are synced.

        Where the step has a checkpoint already, the two directories exchange their names, and ``sweep`` deletes it.
        """
        partial, final = self._partial(name, attempt), self.root / name
        with LocalFolder(partial).create(MANIFEST) as out:
            out.write(manifest)
        sync_tree(partial)
        if not final.exists():
            partial.rename(final)
        elif not exchanged(partial, final):  # the same step is saved again, where a kill between two renames loses it
            final.rename(self._partial(name, f"before-{attempt}"))
            partial.rename(final)
        sync_directory(self.root)

    def discard(self, name: str, attempt: str) -> None:
        """Removes the attempt's directory."""
        if self._partial(name, attempt).exists():
            delete(self._partial(name, attempt))

    def set_aside(self, name: str) -> str:
        """Renames the checkpoint to NAME.damaged, or NAME.damaged-2 and so on; returns the new path."""
        target = self.root / f"{name}.damaged"
        number = 1
        while target.exists():
            number += 1
            target = self.root / f"{name}.damaged-{number}"
        (self.root / name).rename(target)
        sync_directory(self.root)
        return str(target)

    def remove(self, name: str) -> None:
        """Deletes a checkpoint: its directory gets a hidden name first. Of a link to a directory, deletes the link."""
        hidden = self._partial(name, "removed")
        if os.path.lexists(hidden):
            delete(hidden)
        (self.root / name).rename(hidden)
        delete(hidden)

    def set_aside_ones(self) -> list[Folder]:
        """The checkpoints that were set aside: directories named NAME.damaged and so on."""
        return [LocalFolder(path) for path in sorted(self.root.glob("step-*.damaged*"))]

    def leftovers(self) -> list[Folder]:
        """The hidden directories, of attempts and removals that have not ended."""
        return [LocalFolder(path) for path in sorted(self.root.glob(".step-*.partial"))]

    def sweep(self) -> list[str]:
        """Deletes the leftovers (of links, the links); returns their names."""
        partial = self.leftovers()
        try_each(lambda folder: delete(Path(folder.location)), partial)
        return [each.name for each in partial]

    def _partial(self, name: str, attempt: str) -> Path:
        return self.root / f".{name}.{attempt}.partial"


def exchanged(path: Path, other: Path) -> bool:
    """Exchanges the names of two files or directories in one atomic act; False where the system cannot, as on NFS."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # Linux's; older C libraries lack it
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(path), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):  # the last by a filter of system calls
        return False
    raise OSError(error, os.strerror(error), str(path), None, str(other))


def _linked(path: Path, target: Path) -> bool:
    """Gives the file at ``path`` the further name ``target`` by a hard link; returns False where that name is taken.

    On a file system without hard links it looks whether the name is free, and renames the file.
    """
    try:
        os.link(path, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        if target.exists():
            return False
        path.replace(target)
    return True


def delete(path: Path) -> None:
    """Deletes a directory with all that is in it, or a link to a directory. An OSError begins with the path."""
    try:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        raise OSError(f"{path}: {error}") from error


def sync_tree(directory: Path) -> None:
    """Syncs a directory and all directories below it, so that their files' names are durable; files must be synced."""
    for path in [directory, *(path for path in directory.rglob("*") if path.is_dir())]:
        sync_directory(path)


def sync_directory(directory: Path) -> None:
    """Syncs a directory, so that names and renames in it are durable."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
