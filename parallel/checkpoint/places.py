"""From a path or a URL, as a config or a user gives it, to the place that it names."""

from pathlib import Path

from parallel.checkpoint.local import LocalFolder, LocalStore
from parallel.checkpoint.objects import ObjectFolder, ObjectStore
from parallel.checkpoint.store import Folder, Store, step_name

LOCAL_SCHEMES = ("file://", "local://")


def is_remote(location: str | Path) -> bool:
    """Whether fsspec is to find it: a URL like s3://bucket/prefix. ``file://`` and ``local://`` are local."""
    return "://" in str(location) and not str(location).startswith(LOCAL_SCHEMES)


def open_store(location: str | Path) -> Store:
    """The checkpoints at a path or a URL; it need not exist yet. Raises ValueError or ImportError for a foreign URL."""
    if is_remote(location):
        return ObjectStore(str(location))
    return LocalStore(local_path(location))


def open_folder(location: str | Path | Folder) -> Folder:
    """One checkpoint's folder at a path or a URL; a Folder is given back as it is."""
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
    """The checkpoints at a path or a URL, oldest first. Damaged and partial ones are not among them."""
    store = open_store(checkpoints) if isinstance(checkpoints, Path | str) else checkpoints
    return [store.folder(name) for name in store.names()]


def step_directory(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint after update ``step`` lies on a file system."""
    return checkpoints / step_name(step)
