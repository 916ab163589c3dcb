"""Opens files in a folder whose contents are not trusted: only regular files are read, and no link is followed."""

import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnfitFile(OSError):
    """Something under a name is no file that may be read. The message continues the file's name: "is a named pipe"."""


def look(folder: Path, file: str) -> os.stat_result:
    """The stat result of FOLDER/FILE, which must be a regular file, with no symbolic link in its path below ``folder``.

    ``folder`` itself may be a link, since the user named it. Raises FileNotFoundError, or UnfitFile for anything that
    is no regular file or lies behind a link.
    """
    path = folder
    *above, name = file.split("/")
    for part in above:
        path = path / part
        _require(os.lstat(path).st_mode, stat.S_IFDIR, f"lies behind {part}, which")
    found = os.lstat(path / name)
    _require(found.st_mode, stat.S_IFREG, "")
    return found


def open_regular(folder: Path, file: str) -> int:
    """A descriptor for reading FOLDER/FILE. Raises FileNotFoundError or UnfitFile, under the rules of ``look``.

    A pipe that takes the file's place in the meantime does not block the call.
    """
    look(folder, file)
    handle = os.open(folder / file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require(os.fstat(handle).st_mode, stat.S_IFREG, "")
    except UnfitFile:
        os.close(handle)
        raise
    return handle


def _require(mode: int, kind: int, subject: str) -> None:
    found = stat.S_IFMT(mode)
    if found != kind:
        wanted = "a folder" if kind == stat.S_IFDIR else "a file"
        raise UnfitFile(f"{subject} is {_KINDS.get(found, wanted)}, not {wanted}".strip())
