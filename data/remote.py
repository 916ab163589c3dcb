"""An object at a URL, on an object store or anywhere that fsspec can open: read in ranges, refused once it changes."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from data.errors import DataError, UnreadObject, reason_of, refuse

VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime")
WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # between tries
T = TypeVar("T")


@dataclass(frozen=True)
class ObjectRecord:
    """An object's URL, size and version as the store reported them when it was first read."""

    url: str
    size: int
    version: str

    def __str__(self) -> str:
        return f"{self.size} bytes, {self.version or 'of no stated version'}"


def changed(url: str, before: object, now: object, folder: Path) -> DataError:
    """The refusal of an object that has changed. ``before`` and ``now`` are its records as dicts, or None if missing.

    ``folder`` is what to delete in order to accept the change.
    """
    was, is_now = (str(ObjectRecord(**each)) if isinstance(each, dict) else "not there" for each in (before, now))
    rule = f"has changed: it is {is_now} now, and was {was}"
    return refuse(url, rule, f"put the former one back, or delete {folder} and begin another run")


class RemoteObject:
    """One object of a store, by URL. After each read its version is checked again."""

    def __init__(self, url: str, record: ObjectRecord | None = None) -> None:
        self.url, self.record = url, record
        self._opened: tuple[int, Any, str] | None = None  # by process: a fork cannot use its parent's connections

    def look(self, *, may_lack: bool = False) -> ObjectRecord | None:
        """The object's present record from the store, which is kept; None for a missing object that ``may_lack``.

        Raises DataError for another missing object, and UnreadObject where the store does not answer.
        """
        self.record = self._attempt(self._told)
        if self.record is None and not may_lack:
            raise refuse(self.url, "is not there", "check the URL, and the keys that lead to it")
        return self.record

    def fetch(self, start: int, stop: int) -> bytes:
        """The bytes [start, stop). Raises DataError where it has changed, UnreadObject after the last try."""

        def read() -> bytes:
            fs, path = self._open()
            data = fs.cat_file(path, start=start, end=stop)
            now = self._told()
            if now != self.record:
                before = asdict(self.record) if self.record is not None else None
                raise changed(self.url, before, asdict(now) if now is not None else None, Path("the cache of it"))
            if len(data) != stop - start:
                raise OSError(f"{len(data)} bytes came of {stop - start}")
            return data

        return self._attempt(read)

    def _told(self) -> ObjectRecord | None:
        fs, path = self._open()
        fs.invalidate_cache()
        try:
            found = fs.info(path)
        except FileNotFoundError:
            return None
        version = ", ".join(f"{key} {found[key]}" for key in VERSION_KEYS if found.get(key) is not None)
        return ObjectRecord(self.url, int(found["size"]), version)

    def _open(self) -> tuple[Any, str]:
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), *open_url(self.url))
        return self._opened[1:]

    def _attempt(self, read: Callable[[], T]) -> T:
        """The result of ``read``, which is called again after a wait where the network or the store fails."""
        for wait in (*WAITS_SECONDS, None):
            try:
                return read()
            except DataError:
                raise
            except (PermissionError, FileNotFoundError) as error:
                raise UnreadObject(f"{self.url} cannot be read ({reason_of(error)})") from error
            except Exception as error:  # each store's library has its own kinds
                if wait is None:
                    tries = f"{len(WAITS_SECONDS) + 1} tries over {sum(WAITS_SECONDS):.0f} s"
                    raise UnreadObject(f"{self.url} cannot be read after {tries} ({reason_of(error)})") from error
                time.sleep(wait)
        raise AssertionError("the last try returns or raises")


def open_url(url: str) -> tuple[Any, str]:
    """(fsspec's file system, the path in it) of a URL. Raises DataError where fsspec cannot open such URLs."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        kind = url.partition("://")[0]
        remedy = "install roundtable[s3] for s3://, or what the message names"
        raise refuse(
            url, f"cannot be opened: fsspec lacks what {kind}:// needs ({reason_of(error)})", remedy
        ) from error
    except ValueError as error:
        raise refuse(url, f"is no URL that fsspec can open ({reason_of(error)})", "check it") from error
