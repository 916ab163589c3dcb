"""A file in the run directory that records the newest checkpoint, so that a start notices when checkpoints are lost."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.partial import move_into_place
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.training.run_parts import CONFIG, NEWEST, check_parts
from parallel.checkpoint.manifest import DamagedCheckpoint, whole_manifest
from parallel.checkpoint.places import is_remote, list_checkpoints, local_path
from parallel.checkpoint.store import Folder


@dataclass(frozen=True)
class Newest:
    """The last checkpoint that the run has saved or resumed from."""

    name: str
    location: str  # the place that holds it: a URL, or an absolute path


def write_newest(run_path: Path, name: str, location: str) -> None:
    """Records the checkpoint ``name`` in ``location``. The file is replaced atomically and durably.

    Its first line is the name, which the job script reads.
    """
    where = location if is_remote(location) else os.path.abspath(local_path(location))
    temporary = run_path / f"{NEWEST}.partial"
    try:
        temporary.write_bytes(os.fsencode(f"{name}\n{where}\n"))
        move_into_place(temporary, run_path / NEWEST)
    finally:
        temporary.unlink(missing_ok=True)


def read_newest(run_path: Path) -> Newest | None:
    """The recorded newest checkpoint; None for a run that has none yet. Raises UserError where the file is damaged."""
    check_parts(run_path, NEWEST)
    path = run_path / NEWEST
    if not path.exists():
        return None
    name, _, location = os.fsdecode(path.read_bytes()).partition("\n")
    return Newest(name, location.rstrip("\n"))


def check_checkpoints(config: RunConfig, *, is_new: bool) -> None:
    """Raises UserError where a start would lose the run's progress, or resume from another run's checkpoints.

    That is: all checkpoints are damaged, they are gone though one is on record, or ``checkpoint.dir`` of a new run
    (``is_new``: its directory has had no start) already holds some. A run that was killed before its first checkpoint
    has none on record, and begins again. Reads only; raises OSError where checkpoints cannot be read.
    """
    location, newest = config.checkpoint_location, read_newest(config.run_path)
    folders = list_checkpoints(location)
    damaged = why_none_is_whole(folders)
    if folders and config.checkpoint.dir is not None and is_new:
        raise UserError([foreign_line(config, folders[-1])])
    if damaged or (newest is not None and not folders):
        raise UserError([lost_line(config.run_path, location, damaged, newest)])


def why_none_is_whole(folders: Sequence[Folder]) -> list[str]:
    """One line for each damaged checkpoint, the newest first; empty where one is whole by its manifest and sizes."""
    damaged = []
    for folder in reversed(folders):
        try:
            whole_manifest(folder)
        except DamagedCheckpoint as error:
            damaged.append(f"{folder.name} is damaged: {error}")
            continue
        return []
    return damaged


def foreign_line(config: RunConfig, newest: Folder) -> str:
    """The refusal of a new run whose checkpoint.dir already holds checkpoints of another run."""
    given, run_path = config.checkpoint.dir, config.run_path
    rule = f"must be this run's alone, and holds {newest.name} of another run, since run_dir={run_path} is new"
    remedy = f"choose another; init_from={newest.location} takes its weights, `roundtable branch` its states too"
    adopted = f"where it is this run's own, and run_dir was lost, put a copy of {newest.path(CONFIG)} there"
    return f"checkpoint.dir={given} {rule}; {remedy}; {adopted}"


def lost_line(run_path: Path, location: str, damaged: Sequence[str], newest: Newest | None = None) -> str:
    """The refusal to begin a run again from step 0: its checkpoints are ``damaged``, or gone though one is recorded."""
    rule, other = f"run_dir={run_path} must hold a whole checkpoint to go on from", "or choose another name or run_dir"
    if damaged:
        return f"{rule}, and all {len(damaged)} in {location} are damaged ({damaged[0]}); restore one, {other}"
    saved = f", since it has saved {newest.name} in {newest.location}" if newest is not None else ""
    return f"{rule}{saved}, and {location} holds none; put them back, set checkpoint.dir to where they are, {other}"
