"""Finding the files that a folder or a glob stands for, each once, whatever links lead to it.

Links to folders are followed, but each folder is searched once: otherwise a loop of links would give a file a name for
each round, and two loops in one folder more names than any search could finish.
"""

import glob
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from data.errors import refuse

RECURSIVE = "**"
LEAVE_OUT = "remove it, or leave it out with exclude"


def find_matching(pattern: str) -> list[str]:
    """The paths that match a glob: files, folders and anything else with a matching name.

    ``**`` also matches nested folders; hidden names match only parts that begin with a dot. Raises DataError where a
    folder cannot be read.
    """
    return _search("/" if pattern.startswith("/") else "", [part for part in pattern.split("/") if part])


def find_below(folder: str) -> list[str]:
    """All paths below a folder except hidden ones. Raises DataError where a folder cannot be read."""
    return _search(folder, [RECURSIVE])


def _search(start: str, parts: list[str]) -> list[str]:
    """The paths that match ``parts`` within ``start`` ("" is the current folder).

    Each folder is searched once for each part, and links are followed only after everything that is reached without
    them: so the search ends, and a folder is found by its own name rather than a link's.
    """
    found: list[str] = []
    seen: set[tuple[object, int]] = set()
    to_do, links = [(start, 0)], []
    while to_do or links:
        if not to_do:
            to_do, links = sorted(links, reverse=True), []  # the same names, however a disk orders them
        folder, place = to_do.pop()
        for path, next_place, is_link in _expand(folder, parts, place, seen):
            if next_place == len(parts):
                found.append(path)
            else:
                (links if is_link else to_do).append((path, next_place))
    return found


def _expand(
    folder: str, parts: list[str], place: int, seen: set[tuple[object, int]]
) -> Iterator[tuple[str, int, bool]]:
    """(path, next part to match within it, whether it is a link) of all that parts[place] matches in ``folder``."""
    part, after = parts[place], place + 1
    is_last = after == len(parts)
    if not glob.has_magic(part):
        path = os.path.join(folder, part)
        if os.path.lexists(path):
            yield path, after, os.path.islink(path)
        return
    if not os.path.isdir(folder or "."):
        return
    key = identity(os.stat(folder or "."), folder), place
    if key in seen:
        return
    seen.add(key)
    if part == RECURSIVE and not is_last:
        yield folder, after, False
    for entry in _entries(folder):
        if entry.name.startswith(".") and not part.startswith("."):
            continue
        path, is_link = os.path.join(folder, entry.name), entry.is_symlink()
        is_folder = os.path.isdir(path) if is_link else entry.is_dir()
        if part == RECURSIVE and is_folder:
            yield path, place, is_link
        if (is_last or is_folder) and (fnmatchcase(entry.name, part) or (is_last and part == RECURSIVE)):
            yield path, after, is_link


def matches_parts(path: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a glob matches this file's path, without looking at the disk; both are split at their slashes."""
    if not (path and pattern):
        return not (path or pattern)
    part, rest = pattern[0], pattern[1:]
    if part == RECURSIVE:
        n_visible = next((place for place, name in enumerate(path) if name.startswith(".")), len(path))
        return n_visible == len(path) if not rest else any(matches_parts(path[n:], rest) for n in range(n_visible + 1))
    is_found = fnmatchcase(path[0], part) and (part.startswith(".") or not path[0].startswith("."))
    return is_found and matches_parts(path[1:], rest)


def identity(status: os.stat_result, path: str) -> object:
    """A key that is the same for all names of a file or folder: device and inode, or else the real path."""
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(path)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder or ".") as entries:
            return list(entries)
    except OSError as error:
        raise refuse(folder or ".", f"cannot be looked into ({error.strerror})", LEAVE_OUT) from error


def keep_files(paths: Iterable[str], key: str, *, folders_are_wrong: bool = False) -> list[tuple[str, int]]:
    """(path, bytes) of the regular files among ``paths``, sorted. Of a file's names the first that is no link is kept.

    Folders are left out, or refused where ``folders_are_wrong``. Raises DataError, with ``key`` naming the source, for
    a broken link, a file that may not be read, and anything else: reading a pipe, for example, could block forever.
    """
    kept: dict[object, tuple[str, int]] = {}
    for path in sorted(set(paths), key=lambda path: (os.path.islink(path), path)):
        try:
            status = os.stat(path)
        except OSError as error:
            raise refuse(f"{key}: {path}", f"cannot be read ({error.strerror})", LEAVE_OUT) from error
        is_folder = stat.S_ISDIR(status.st_mode)
        if is_folder and not folders_are_wrong:
            continue
        if not stat.S_ISREG(status.st_mode):
            remedy = f"end the glob with /** to reach into it, or {LEAVE_OUT}" if is_folder else LEAVE_OUT
            raise refuse(f"{key}: {path}", f"is {_kind(status.st_mode)}, not a file", remedy)
        if not os.access(path, os.R_OK):
            raise refuse(f"{key}: {path}", "may not be read by this user", LEAVE_OUT)
        kept.setdefault(identity(status, path), (path, status.st_size))
    return sorted(kept.values())


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
