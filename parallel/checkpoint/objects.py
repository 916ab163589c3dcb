"""Checkpoints on an object store, or any other place of fsspec's. It has no renames, so writing the manifest commits.

    PREFIX/step-00000100/manifest.json                  the commit; without it there is no checkpoint
    PREFIX/step-00000100/ATTEMPT/shard-00000.safetensors   written before; no two attempts write to one name

A stale process, whose run has been started again, may still write objects, but under its own attempt's names: no
manifest refers to them, and the next sweep removes them.
"""

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import fsspec

from parallel.checkpoint.errors import UnreachableStore
from parallel.checkpoint.regular import UnfitFile
from parallel.checkpoint.schema import LARGEST_MANIFEST_BYTES
from parallel.checkpoint.store import MANIFEST, MOST_OWNER, OWNER, Folder, Input, Output, at_most, in_order, try_each

DAMAGED = "manifest.damaged.json"  # what the manifest of a checkpoint is renamed to when it is set aside
VERSION_KEYS = ("size", "ETag", "etag", "md5Hash", "generation", "LastModified", "last_modified", "mtime")
PATTERN_SIGNS = frozenset("*?[")  # fsspec's rm and copy treat a path with one as a pattern that matches other objects
PART_BYTES = 16 << 20  # of one part of an upload, and of one read: held in memory besides the state


@contextlib.contextmanager
def as_store_errors(place: str) -> Iterator[None]:
    """While entered, turns errors of an fsspec file system or its library into UnreachableStore with ``place`` named.

    FileNotFoundError stays one, with the place named, and UnfitFile is unchanged.
    """
    try:
        yield
    except UnfitFile:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{place}: {_reason(error)}") from error
    except Exception as error:  # each library has its own exceptions; all of them mean that the operation failed
        raise UnreachableStore(f"{place}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """A library's error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError) and text else f"{type(error).__name__}: {text}"


class ObjectOutput:
    """An object being uploaded; it exists once it is left without an exception."""

    def __init__(self, file: Any, path: str) -> None:
        self.file, self.path = file, path

    def write(self, data: Any) -> None:
        """Appends all bytes of a buffer."""
        with as_store_errors(self.path):
            self.file.write(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            with as_store_errors(self.path):
                self.file.close()
            return
        with contextlib.suppress(Exception):  # the next sweep removes the upload; the first error is the one to raise
            self.file.discard()
        self.file.closed = True  # else its finalizer would complete the upload


class ObjectInput:
    """An object being read in parts; a context manager."""

    def __init__(self, file: Any, path: str) -> None:
        self.file, self.path = file, path

    def seek(self, offset: int, /) -> int:
        """Moves to byte ``offset``, where the next read begins."""
        return self.file.seek(offset)

    def readinto(self, buffer: Any, /) -> int:
        """Reads into the buffer, which one read may fill only in part; returns the number of bytes, 0 at the end."""
        with as_store_errors(self.path):
            return self.file.readinto(buffer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.file.close()


class ObjectFolder:
    """One checkpoint's objects: those below a prefix."""

    def __init__(self, fs: Any, root: str, location: str) -> None:
        self.fs = fs
        self.root = root.rstrip("/")
        self.location = location.rstrip("/")
        self.name = self.root.rpartition("/")[2]

    @classmethod
    def at(cls, url: str) -> "ObjectFolder":
        """The folder at a URL. Raises ValueError or ImportError where fsspec cannot open such URLs."""
        fs, root = fsspec.core.url_to_fs(url)
        return cls(fs, root, url)

    def __str__(self) -> str:
        return self.location

    def below(self, name: str) -> "ObjectFolder":
        """The folder ``name`` within this one."""
        return ObjectFolder(self.fs, f"{self.root}/{name}", f"{self.location}/{name}")

    def path(self, file: str) -> str:
        """The object's URL."""
        return f"{self.location}/{file}"

    def size(self, file: str) -> int | None:
        """The object's size in bytes; None where it is missing. Raises UnfitFile where it is no file."""
        try:
            return int(self._look(file)["size"])
        except FileNotFoundError:
            return None

    def stamp(self, file: str) -> tuple[Any, ...]:
        """A value that changes when the object is replaced, from what this store reports of an object's version."""
        found = self._look(file)
        return tuple(found.get(key) for key in VERSION_KEYS)

    def _look(self, file: str) -> dict[str, Any]:
        """The store's present information on an object. Raises FileNotFoundError, or UnfitFile where it is no file."""
        with as_store_errors(self.path(file)):
            self.fs.invalidate_cache()  # so that the store is asked, not the cache of an earlier listing
            found = self.fs.info(f"{self.root}/{file}")
        if found["type"] != "file" or found.get("islink"):
            raise UnfitFile("is a symbolic link, not a file" if found.get("islink") else "is no file")
        return found

    def read_bytes(self, file: str, most: int) -> bytes:
        """The object's whole content. Raises UnfitFile where it has more than ``most`` bytes."""
        if (self.size(file) or 0) > most:
            raise UnfitFile(f"has more than the {most} bytes that such a file may have")
        with as_store_errors(self.path(file)):
            return at_most(self.fs.cat_file(f"{self.root}/{file}"), most)

    def open(self, file: str) -> Input:
        """The object, opened for reading in pieces; parts are fetched ahead."""
        self._look(file)
        options = {"block_size": PART_BYTES, "cache_type": "readahead"}
        with as_store_errors(self.path(file)):
            self.fs.invalidate_cache(self.root)
            return ObjectInput(self.fs.open(f"{self.root}/{file}", "rb", **options), self.path(file))

    def create(self, file: str) -> Output:
        """A new object, opened for writing in pieces; a part is uploaded as soon as it is full."""
        with as_store_errors(self.path(file)):
            return ObjectOutput(self.fs.open(f"{self.root}/{file}", "wb", block_size=PART_BYTES), self.path(file))

    def files(self) -> list[str]:
        """The names of all objects in the folder and below, sorted."""
        with as_store_errors(self.location):
            self.fs.invalidate_cache()
            return sorted(path.removeprefix(f"{self.root}/") for path in self.fs.find(self.root))

    def delete(self, files: list[str]) -> None:
        """Deletes objects; ones that are already gone are ignored. Raises OSError where one is still there after it."""
        if not files:
            return
        with as_store_errors(self.location), contextlib.suppress(FileNotFoundError):
            if PATTERN_SIGNS.isdisjoint("".join([self.root, *files])):
                self.fs.rm([f"{self.root}/{file}" for file in files])
            else:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        self.fs.rm_file(f"{self.root}/{file}")
        kept = sorted(set(files).intersection(self.files()))  # s3fs ignores what S3 reports of single objects
        if kept:
            raise UnreachableStore(f"{self.path(kept[0])}: the store did not delete it")

    def move(self, file: str, target: str) -> None:
        """Renames an object, by a copy and a deletion."""
        with as_store_errors(self.path(file)):
            self.fs.cp_file(f"{self.root}/{file}", f"{self.root}/{target}")
            self.fs.rm_file(f"{self.root}/{file}")


class ObjectStore:
    """A store that holds each checkpoint as a prefix below the prefix that a URL names."""

    def __init__(self, url: str) -> None:
        self.root = ObjectFolder.at(url)
        self.location = self.root.location

    def folder(self, name: str) -> ObjectFolder:
        """The checkpoint of this name."""
        return self.root.below(name)

    def names(self) -> list[str]:
        """The names of the checkpoints with a manifest, in the order of their steps."""
        return in_order([name for name, files in self._by_name().items() if MANIFEST in files])

    def owner(self) -> bytes | None:
        """The owner's record, an object below the store's prefix; None where there is none."""
        try:
            return self.root.read_bytes(OWNER, MOST_OWNER)
        except FileNotFoundError:
            return None

    def own(self, content: bytes, *, instead: bool) -> bool:
        """Writes the owner's record by one put; without ``instead``, only if there is none (S3 lets one writer win).

        Returns whether the record there is now ``content``.
        """
        if not instead and self.root.size(OWNER) is not None:
            return self.owner() == content
        try:
            with as_store_errors(self.root.path(OWNER)):
                mode = "overwrite" if instead else "create"
                self.root.fs.pipe_file(f"{self.root.root}/{OWNER}", content, mode=mode)
        except OSError:
            found = self.owner()
            if found is None:
                raise
            return found == content  # a put may have been tried again after a lost answer
        return True

    def begin(self, name: str, attempt: str) -> tuple[ObjectFolder, str]:
        """The checkpoint's own folder, and the prefix of the attempt's file names in it."""
        return self.folder(name), f"{attempt}/"

    def commit(self, name: str, attempt: str, manifest: bytes) -> None:
        """Writes the manifest by one put, which a store does wholly or not at all.

        A step's first manifest is written only if no other process has written one (S3).
        """
        folder = self.folder(name)
        mode = "create" if folder.size(MANIFEST) is None else "overwrite"
        try:
            with as_store_errors(folder.path(MANIFEST)):
                folder.fs.pipe_file(f"{folder.root}/{MANIFEST}", manifest, mode=mode)
        except OSError:
            with contextlib.suppress(FileNotFoundError, UnfitFile):
                if folder.read_bytes(MANIFEST, len(manifest)) == manifest:  # a put was tried again after a lost answer
                    return
            raise

    def discard(self, name: str, attempt: str) -> None:
        """Deletes the attempt's objects."""
        folder = self.folder(name)
        folder.delete([file for file in folder.files() if file.startswith(f"{attempt}/")])

    def set_aside(self, name: str) -> str:
        """Renames the manifest, so that this is no checkpoint any more; the other objects stay. Returns its new URL."""
        folder = self.folder(name)
        folder.move(MANIFEST, DAMAGED)
        return folder.path(DAMAGED)

    def remove(self, name: str) -> None:
        """Deletes a checkpoint: first its manifest, then its other objects.

        Where a damaged one of the same step was set aside, that one's objects stay.
        """
        folder = self.folder(name)
        files = folder.files()
        if DAMAGED in files:
            content = folder.read_bytes(MANIFEST, LARGEST_MANIFEST_BYTES)
            files = [file for file in files if f'"{file.partition("/")[0]}/'.encode() in content]  # of its attempt
        folder.delete([MANIFEST])
        folder.delete([file for file in files if file != MANIFEST])

    def set_aside_ones(self) -> list[Folder]:
        """The checkpoints that were set aside: those with a renamed manifest."""
        return [self.folder(name) for name, files in sorted(self._by_name().items()) if DAMAGED in files]

    def leftovers(self) -> list[Folder]:
        """The folders with neither a manifest nor a renamed one, of attempts and removals that did not end."""
        found = sorted(self._by_name().items())
        return [self.folder(name) for name, files in found if MANIFEST not in files and DAMAGED not in files]

    def sweep(self) -> list[str]:
        """Deletes the objects of the leftovers; returns the leftovers' names."""
        leftovers = [folder.name for folder in self.leftovers()]
        try_each(lambda name: self.folder(name).delete(self.folder(name).files()), leftovers)
        return leftovers

    def _by_name(self) -> dict[str, set[str]]:
        """The files of each checkpoint, with paths from its folder, by its name. It takes one listing."""
        names: dict[str, set[str]] = {}
        for file in self.root.files():
            name, _, below = file.partition("/")
            if below and in_order([name]):
                names.setdefault(name, set()).add(below)
        return names
