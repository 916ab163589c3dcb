"""Opens the checkpoint store or folder that a path or URL names."""

from pathlib import Path

from parallel.checkpoint.local import LocalFolder, LocalStore
from parallel.checkpoint.objects import ObjectFolder, ObjectStore
from parallel.checkpoint.store import Folder, Store, step_name

LOCAL_SCHEMES = ("file://", "local://")


def is_remote(location: str | Path) -> bool:
    """Whether a location is opened by fsspec: a URL like s3://bucket/prefix. ``file://`` and ``local://`` are local."""
    return "://" in str(location) and not str(location).startswith(LOCAL_SCHEMES)


def open_store(location: str | Path) -> Store:
    """The store of checkpoints at a path or a URL, which need not exist yet.

    Raises ValueError or ImportError where fsspec cannot open such a URL.
    """
    if is_remote(location):
        return ObjectStore(str(location))
    return LocalStore(local_path(location))


def open_folder(location: str | Path | Folder) -> Folder:
    """The folder of one checkpoint at a path or a URL; a Folder is returned as it is."""
    if not isinstance(location, str | Path):
        return location
    if is_remote(location):
        return ObjectFolder.at(str(location))
    return LocalFolder(local_path(location))


def local_path(location: str | Path) -> Path:
    """The path of a location that is not remote."""
    for scheme in LOCAL_SCHEMES:
        location = str(location).removeprefix(scheme)
    return Path(location)


def list_checkpoints(checkpoints: Path | str | Store) -> list[Folder]:
    """The folders of all checkpoints at a path or a URL, oldest first, without partial ones and those set aside."""
    store = open_store(checkpoints) if isinstance(checkpoints, Path | str) else checkpoints
    return [store.folder(name) for name in store.names()]


def step_directory(checkpoints: Path, step: int) -> Path:
    """The directory of the checkpoint after update ``step``, on a file system."""
    return checkpoints / step_name(step)
