"""The mark by which one run owns ``checkpoint.dir``, so that no other run uses it.

Two runs in one place would resume from each other's weights and delete each other's unfinished checkpoints. Each run
draws a random id at its first start and keeps it in its directory; the mark holds the id and the directory's path. A
mark is valid as long as that directory exists and holds that id: one left by a removed run binds nobody.
"""

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from data.places import is_same_place
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.guard.fence import ENDS, Fence, StaleRun
from launcher.training.run_parts import CHECKPOINTS, CONFIG, RUN_ID, check_parts
from parallel.checkpoint.places import is_remote, list_checkpoints, local_path, open_store
from parallel.checkpoint.regular import UnfitFile
from parallel.checkpoint.store import OWNER, Store

REMEDY = "remove it once no run keeps its checkpoints there"


class Owner(NamedTuple):
    """The run that owns a place for checkpoints."""

    run: str  # the id that the run drew
    run_dir: str  # an absolute path

    def text(self) -> bytes:
        """The mark's content, one line of JSON."""
        return f"{json.dumps(self._asdict())}\n".encode()

    def is_there(self) -> bool:
        """Whether the run's directory is still where the mark says, with the run's id in it."""
        return read_run_id(Path(self.run_dir)) == self.run


def read_run_id(run_path: Path) -> str | None:
    """The id that the run drew at its first start; None before that. Raises UserError where the file is damaged."""
    check_parts(run_path, RUN_ID)
    path = run_path / RUN_ID
    return path.read_text().strip() if path.is_file() else None


def owner_of(location: str | Path) -> Owner | None:
    """The run that owns the place ``location`` by its mark; None where there is no mark.

    A run's own folder of checkpoints has no mark and belongs to that run. Raises UserError for a damaged or unreadable
    mark, and OSError where an object store does not answer.
    """
    try:
        content = open_store(location).owner()
    except OSError as error:
        if is_remote(location):
            raise
        reason = str(error) if isinstance(error, UnfitFile) else f"is not ({error.strerror})"
        raise UserError([f"{location}/{OWNER} must be a file that can be read, and {reason}; {REMEDY}"]) from None
    if content is not None:
        return _parsed(content, location)
    folder = None if is_remote(location) else local_path(location)
    if folder is None or folder.name != CHECKPOINTS:
        return None
    run = read_run_id(folder.parent)  # a run's own folder of checkpoints bears no mark
    return Owner(run, os.path.abspath(folder.parent)) if run is not None else None


def _parsed(content: bytes, location: str | Path) -> Owner:
    try:
        found = json.loads(content)
        owner = Owner(found["run"], found["run_dir"])
    except (ValueError, KeyError, TypeError, RecursionError):
        owner = None
    if owner is None or not all(isinstance(each, str) and "\0" not in each for each in owner):
        rule = "must say which run keeps its checkpoints there"
        raise UserError([f"{location}/{OWNER} {rule}; {REMEDY}"])
    return owner


def check_owner(config: RunConfig) -> str | None:
    """The run's id; None where this start has to draw a new one. Reads only.

    Raises UserError where ``checkpoint.dir`` belongs to another run, and OSError where it cannot be read.
    """
    run_path, location = config.run_path, config.checkpoint_location
    own, found = read_run_id(run_path), owner_of(location)
    if found is None or is_same_place(found.run_dir, run_path):
        return own
    _refuse_living(config, found)
    if own is None:  # the run directory was lost and made anew, unless it is new: then check_checkpoints decides
        return found.run if (run_path / CONFIG).exists() else None
    if found.run != own and list_checkpoints(location):
        given = config.checkpoint.dir
        rule = f"must be this run's alone, and holds those of the run in {found.run_dir}, which is gone"
        remedy = f"choose another; init_from={given} takes its weights"
        is_own = f"where they are this run's own, remove {location}/{OWNER}"
        raise UserError([f"checkpoint.dir={given} {rule}; {remedy}; {is_own}"])
    return own


def take_checkpoints(config: RunConfig, run: str) -> None:
    """Marks ``checkpoint.dir`` as this run's. One process calls it, after ``check_owner``.

    Does nothing where checkpoint.dir is null. Raises UserError where another run has marked it meanwhile, or the mark
    cannot be written.
    """
    location, mine = config.checkpoint_location, Owner(run, os.path.abspath(config.run_path))
    if config.checkpoint.dir is None:
        return
    found = owner_of(location)
    if found == mine:
        return
    _refuse_living(config, found)
    _put(open_store(location), mine, config, found)
    found = owner_of(location)
    if found != mine:
        raise UserError([_line(config, found or mine)])


@contextmanager
def keeping(config: RunConfig, fence: Fence) -> Iterator[None]:
    """A context in which this process may change the checkpoints: it holds the fence, and its run owns the place.

    A mark that was removed is written again. Raises StaleRun where another run has taken the place, and OSError where
    the mark cannot be read.
    """
    with fence.held():
        run, location = read_run_id(config.run_path), config.checkpoint_location
        try:
            found = owner_of(location)
            if found is None and run is not None:
                take_checkpoints(config, run)
        except UserError as error:
            raise OSError(error.problems[0]) from None
        if found is not None and found.run != run:
            raise StaleRun(f"{location} was taken by the run in {found.run_dir}{ENDS}")
        yield


def _refuse_living(config: RunConfig, found: Owner | None) -> None:
    if found is not None and not is_same_place(found.run_dir, config.run_path) and found.is_there():
        raise UserError([_line(config, found)])


def _put(store: Store, mine: Owner, config: RunConfig, found: Owner | None) -> None:
    try:
        store.own(mine.text(), instead=found is not None)
    except OSError as error:
        given, reason = config.checkpoint.dir, error.strerror or str(error)
        raise UserError([f"checkpoint.dir={given} must be writable, and is not ({reason}); choose another"]) from None


def new_run_id() -> str:
    """A random id for a new run: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def _line(config: RunConfig, owner: Owner) -> str:
    given, run_dir = config.checkpoint.dir, owner.run_dir
    rule = f"must be this run's alone, and is kept by the run in {run_dir}"
    remedy = f"choose another; init_from={run_dir} takes its weights, `roundtable branch` its states too"
    return f"checkpoint.dir={given} {rule}; {remedy}"
