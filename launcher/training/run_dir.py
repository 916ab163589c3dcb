"""The run directory: claiming it for one start, its saved config, and what may change between a run's starts."""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from data.config import FREE_FIELDS
from data.errors import DataError, reason_of
from data.mixture import DEALING
from data.partial import move_into_place
from data.places import is_same_place, why_not_writable
from data.rules import set_in_vain
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.guard.fence import Fence, raise_fence
from launcher.slurm.queue import has_ended, slurm_job
from launcher.training.owner import check_owner, new_run_id, take_checkpoints
from launcher.training.remote_tokens import remote_tokens
from launcher.training.run_parts import (
    CHECKPOINTS,
    CONFIG,
    LOCK,
    REMOTE_TOKENS,
    RUN_ID,
    STARTED_IN,
    TOKEN_FILES,
    check_parts,
)
from launcher.training.stage_changes import STAGES, is_of_stages, stage_problem
from launcher.training.token_files import token_files
from parallel.checkpoint.manifest import DamagedCheckpoint, Manifest, read_manifest
from parallel.checkpoint.places import is_remote, list_checkpoints, local_path, open_store
from parallel.checkpoint.store import step_of
from parallel.processes.environment import number

# data.without may name another file as long as the listed documents stay: `launcher.training.without` checks that.
FREE_DATA_KEYS = tuple(f"data.{name}" for name in (*FREE_FIELDS, "without"))


def saved_config(run_path: Path) -> RunConfig | None:
    """The config that the run was last started with, or None for a new run. Raises UserError where it is damaged."""
    check_parts(run_path, CONFIG)
    path = run_path / CONFIG
    if not path.exists():
        return None
    try:
        return load_config(path)
    except UserError as error:
        named = (line if line.startswith(f"{path}") else f"{path}: {line}" for line in error.problems)
        raise UserError(list(named)) from None


def start_folder(run_path: Path, config: RunConfig) -> Path:
    """The folder from which the relative paths in a run's saved ``config`` are resolved: where it was last started.

    The run directory records that folder, which holds where the run was not moved, or was moved alone. A run that was
    moved or copied together with that folder (its path still ends in the relative run_dir) gets the folder that it
    lies in now. Where the folder is unknown or gone, it is the current one.
    """
    recorded = recorded_folder(run_path)
    started_in = recorded if recorded is not None and _can_be_entered(recorded) else None
    if started_in is not None and is_same_place(started_in / config.run_path, run_path):
        return started_in
    parts, own = Path(os.path.abspath(run_path)).parts, config.run_path.parts
    if not config.run_path.is_absolute() and parts[-len(own) :] == own:
        return Path(*parts[: -len(own)])
    return started_in if started_in is not None else Path.cwd()


def recorded_folder(run_path: Path) -> Path | None:
    """The folder in which the run was last started, as the run directory records it; None where there is no record."""
    check_parts(run_path, STARTED_IN)
    recorded = run_path / STARTED_IN
    return Path(os.fsdecode(recorded.read_bytes().rstrip(b"\n"))) if recorded.exists() else None


def record_folder(folder: Path) -> bytes:
    """The record of ``folder`` for the run directory, in bytes, since a folder's name need not be valid text."""
    return os.fsencode(f"{folder}\n")


def _can_be_entered(folder: Path) -> bool:
    """Whether the folder exists and this user may change into it."""
    return folder.is_dir() and os.access(folder, os.X_OK)


@contextlib.contextmanager
def in_start_folder(run_path: Path | None, config: RunConfig) -> Iterator[None]:
    """A context whose current folder is the one from which the run's relative paths are resolved; no change for None.

    A DataError raised within names that folder, where it is not the current one, or the recorded one is gone.
    """
    folder = start_folder(run_path, config) if run_path is not None else Path.cwd()
    recorded = recorded_folder(run_path) if run_path is not None else None
    where = ""
    if folder != Path.cwd():
        where = f" (relative paths are read from {folder}, where the run was started)"
    elif recorded is not None and not _can_be_entered(recorded):
        told = f"{recorded}, where the run was started, is gone or may not be entered"
        where = f" (relative paths are read from {folder}: {told}; give the command where the data lies)"
    try:
        with contextlib.chdir(folder):
            yield
    except DataError as error:
        raise DataError(*(line + where for line in error.problems)) from None


def enter_start_folder(path: Path, overrides: Sequence[str] = ()) -> Path:
    """Changes into the folder in which the run was started, if ``path`` is a run's saved config; returns the path.

    The returned path is absolute then; for any other config nothing is done. Raises UserError where the run was moved
    alone, so that its config's run_dir is another place, and no override of run_dir or name says which one is meant.
    """
    run_path = path.parent
    config = saved_config(run_path) if path.name == CONFIG and (run_path / STARTED_IN).exists() else None
    if config is None:
        return path
    folder, path = start_folder(run_path, config), path.absolute()
    renamed = any(override.startswith(("run_dir=", "name=")) for override in overrides)
    if not renamed and not is_same_place(folder / config.run_path, run_path):
        rule = f"must be {run_path.absolute()}, since that run's config was given, and is in {folder}"
        remedy = f"give run_dir={run_path.absolute()} to go on there"
        raise UserError([f"run_dir={config.run_path} {rule}; {remedy}"])
    os.chdir(folder)
    return path


def checkpoints_of(path: Path | str) -> Path | str:
    """The folder or URL of the checkpoints that ``path`` refers to: a run directory, or the checkpoints' own place."""
    if is_remote(path):
        return path
    run_path = Path(path)
    check_parts(run_path, CHECKPOINTS)
    config = saved_config(run_path)
    if config is not None and config.checkpoint.dir is not None:
        location = config.checkpoint.dir
        return location if is_remote(location) else start_folder(run_path, config) / local_path(location)
    return run_path / CHECKPOINTS if (run_path / CHECKPOINTS).is_dir() else run_path


@contextlib.contextmanager
def refusing_unreachable(key: str, location: str | Path) -> Iterator[None]:
    """A context that turns fsspec's errors for a URL into a UserError naming ``key``. Errors of a local path pass."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        if not is_remote(location):
            raise
        reason = reason_of(error).removeprefix(f"{str(location).rstrip('/')}: ")
        rule = f"must be a place that fsspec can list, and it says: {reason}"
        remedy = "install the library that it names, or check address and keys"
        raise UserError([f"{key}={location} {rule}; {remedy}"]) from None


def changes(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every leaf that differs between two config trees."""
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        for field in dataclasses.fields(old):
            below = f"{key}.{field.name}" if key else field.name
            yield from changes(getattr(old, field.name), getattr(new, field.name), below)
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from changes(before, after, f"{key}.{number}")
    elif old != new:
        yield key, old, new


def check_resume(config: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of each change since the run's last start. Reads only.

    Raises UserError where a change is not permitted within a run.
    """
    check_has_trained(config)
    old = saved_config(config.run_path)
    if old is None:
        return []
    scalars = newest_scalars(config)
    check_dealing(config, scalars)
    check_same_run(old, config.run_path / CONFIG, config, int(scalars.get("consumed", 0)))
    return changes_of_start(old, config)


def newest_scalars(config: RunConfig) -> dict[str, Any]:
    """The training state's scalars in the run's newest readable checkpoint; empty where there is none."""
    manifest = newest_manifest(config)
    return manifest.scalars if manifest is not None else {}


def newest_manifest(config: RunConfig) -> Manifest | None:
    """The manifest of the run's newest readable checkpoint that holds a training state; None where there is none."""
    location = config.checkpoint_location
    with refusing_unreachable("checkpoint.dir", location):
        folders = list_checkpoints(location)
    for folder in reversed(folders):
        try:
            manifest = read_manifest(folder)
        except DamagedCheckpoint:
            continue
        if "consumed" in manifest.scalars:
            return manifest
    return None


def consumed_of(config: RunConfig) -> int:
    """The number of the run's next sample by its newest readable checkpoint; 0 where there is none."""
    return int(newest_scalars(config).get("consumed", 0))


def check_dealing(config: RunConfig, scalars: Mapping[str, Any]) -> None:
    """Raises UserError where an older version, which dealt samples to sources in another order, wrote the checkpoint.

    Resuming would repeat some samples and never reach others. With one or two sources the order is the same.
    """
    n_sources, dealing = len(config.data.sources), scalars.get("dealing", 1)
    if n_sources < 3 or dealing == DEALING or not scalars.get("consumed", 0):
        return
    found = f"data.sources of {n_sources} sources are dealt in order {DEALING}"
    rule = f"and {config.checkpoint_location} was trained in order {dealing}, so samples would come twice"
    remedy = "go on with the version of Roundtable that wrote it, or begin another run from its weights (init_from)"
    raise UserError([f"{found}, {rule}; {remedy}"])


def changes_of_start(old: RunConfig, config: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of every leaf that a start changes, with data.stages as a single entry."""
    found = [each for each in changes(old, config) if not is_of_stages(each[0])]
    stages = (STAGES, old.data.stages, config.data.stages)
    return [*found, stages] if stages[1] != stages[2] else found


def check_has_trained(config: RunConfig) -> None:
    """Raises UserError where the run directory holds only weights: a checkpoint of step 0 that no training wrote.

    Imported and averaged weights are such. Reads only; a damaged checkpoint passes, since loading reports it.
    """
    if is_remote(config.checkpoint_location):
        return
    newest = list_checkpoints(local_path(config.checkpoint_location))[-1:]
    if not newest or step_of(newest[0].name) != 0:
        return
    try:
        written_by = read_manifest(newest[0]).scalars["written_by"]
    except DamagedCheckpoint:
        return
    if written_by is None:
        holds = "imported or averaged weights, without the optimizer's states that a run goes on from"
        remedy = f"set init_from={config.run_path}, and choose another name or run_dir"
        raise UserError([f"run_dir={config.run_path} must be a run's, and holds {holds}; {remedy}"])


def check_newest_checkpoint(config: RunConfig) -> None:
    """Raises UserError where the config saved within the newest checkpoint is another run's than ``config``.

    Checkpoints on an object store are not checked. Reads only; an unreadable config passes, since loading reports it.
    """
    if is_remote(config.checkpoint_location):
        return
    folder = local_path(config.checkpoint_location)
    copies = [path for name in open_store(folder).names() if (path := folder / name / CONFIG).is_file()]
    for path in copies[-1:]:
        try:
            old = load_config(path)
        except UserError:
            continue
        check_same_run(old, path, config, consumed_of(config))


def check_same_run(old: RunConfig, path: Path, config: RunConfig, consumed: int) -> None:
    """Raises UserError where ``config`` changes a key of ``old``, read from ``path``, that is fixed within a run.

    ``consumed`` is the number of the resumed run's next sample: data.stages may change from there on.
    """
    remedy = "set it back, or start another run with another name or run_dir"
    # Older configs may have keys without effect, which are refused now: removing them changes no token.
    sources = enumerate(old.data.sources)
    idle = {f"data.sources.{number}.{name}" for number, source in sources for name, _ in set_in_vain(source)}
    problems = [
        f"{key}={_show(after)} must stay {_show(before)}, as {path} has it; {remedy}"
        for key, before, after in changes(old, config)
        if _is_fixed(key) and key not in idle
    ]
    line = stage_problem(old, config, consumed)
    problems += [line] if line is not None else []
    if type(old.optimizer) is not type(config.optimizer):
        problems.append(
            f"optimizer.name={config.optimizer.name} must stay {old.optimizer.name}, as {path} has it; {remedy}"
        )
    if problems:
        raise UserError(problems)


def _is_fixed(key: str) -> bool:
    is_free = key in FREE_DATA_KEYS or is_of_stages(key)
    return key == "seed" or (key.startswith(("model", "data")) and not is_free)


def _show(value: Any) -> str:
    """The value in one line of YAML."""
    if dataclasses.is_dataclass(value):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return "{" + ", ".join(f"{name}: {_show(below)}" for name, below in fields) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_show(part) for part in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_writable(config: RunConfig) -> None:
    """Raises UserError where the run directory, or its folder of checkpoints, cannot be made or written to.

    Changes nothing.
    """
    rule = why_not_writable(config.run_path)
    if rule is not None:
        raise UserError([f"run_dir={config.run_path} {rule}; choose another run_dir"])
    check_parts(config.run_path, CHECKPOINTS, writing=True)


def check_run_dir(config: RunConfig) -> None:
    """Raises UserError where the run directory is damaged, another run's, or another process trains in it.

    Changes nothing. One process calls it, before ``claim``: it reads the whole of metrics.jsonl.
    """
    from launcher.training.newest import check_checkpoints
    from launcher.training.without import check_documents

    check_parts(config.run_path, writing=True)
    check_newest_checkpoint(config)
    with refusing_unreachable("checkpoint.dir", config.checkpoint_location):
        check_owner(config)
        check_checkpoints(config, is_new=saved_config(config.run_path) is None)
        check_documents(config)
    if (config.run_path / LOCK).exists():
        _lock(config.run_path).close()


class Claim:
    """This start's hold on the run directory, until ``close``. A context manager."""

    def __init__(self, lock: IO[str], fence: Fence) -> None:
        self.lock = lock
        self.fence = fence  # rank 0 of this start holds it whenever it writes

    def close(self) -> None:
        """Releases the lock, and empties the lock file if it names this process, so that the next start may claim it.

        The file is not emptied where another process holds the lock or has written its own name: a successor that took
        over, or a predecessor on an unreachable node, whose lock the next start takes over by the name in the file.
        """
        with contextlib.suppress(OSError, ValueError):  # of ValueError: it is closed already
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.lock.seek(0)
            if _holder(self.lock) == holder_of_this_process():
                self.lock.truncate(0)
        self.lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def claim(config: RunConfig) -> Claim:
    """Creates the run directory, and claims it and ``checkpoint.dir`` for this start until the result is closed.

    Earlier starts can no longer write there. The saved config of a run that has begun stays until ``keep_config``. One
    process calls it. Raises UserError where another process trains there, or another run owns ``checkpoint.dir``; a run
    directory that did not exist before is then removed.
    """
    run_path, kept = config.run_path, {REMOTE_TOKENS: remote_tokens(config), TOKEN_FILES: token_files(config)}
    with contextlib.ExitStack() as opened:  # closes the lock again before a failure
        try:
            run_path.mkdir(parents=True, exist_ok=True)
            lock = opened.enter_context(_lock(run_path))
            if os.listdir(run_path) == [LOCK]:
                opened.callback(shutil.rmtree, run_path, ignore_errors=True)
            with refusing_unreachable("checkpoint.dir", config.checkpoint_location):
                run = check_owner(config) or new_run_id()
            fence = raise_fence(run_path)
            with fence.held():
                (run_path / CHECKPOINTS).mkdir(exist_ok=True)
                _replace(run_path / RUN_ID, f"{run}\n".encode())
                if not (run_path / CONFIG).exists():
                    _write_config(config)
                for name, text in kept.items():
                    if text is not None:
                        _replace(run_path / name, text.encode())
                lock.truncate(0)
                lock.write(json.dumps(holder_of_this_process()))
                lock.flush()
                with refusing_unreachable("checkpoint.dir", config.checkpoint_location):
                    take_checkpoints(config, run)  # last: where a write above fails, no mark of this run is left there
        except OSError as error:
            rule = f"must be writable, and is not ({error.filename or run_path}: {error.strerror or error})"
            raise UserError([f"run_dir={run_path} {rule}; mend that, or choose another"]) from None
        opened.pop_all()
    return Claim(lock, fence)


def unrecorded_changes(config: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of each change since the last start whose config was saved."""
    old = saved_config(config.run_path)
    return changes_of_start(old, config) if old is not None else []


def keep_config(config: RunConfig, fence: Fence | None) -> None:
    """Saves the config, and the folder from which its paths are resolved, as those of the last start. Rank 0 calls it.

    Call it after metrics.jsonl has recorded the start and its changes: a start that ends before then has changed
    nothing. On a full disk the former config stays; checkpoints have their own copies.
    """
    with contextlib.suppress(OSError), fence.held() if fence is not None else contextlib.nullcontext():
        _write_config(config)


def _write_config(config: RunConfig) -> None:
    _replace(config.run_path / STARTED_IN, record_folder(Path.cwd()))
    _replace(config.run_path / CONFIG, dump_config(config).encode())


def _replace(path: Path, content: bytes) -> None:
    """Writes a file atomically: after a kill, a power cut or on a full disk the old file or the new one is there."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_bytes(content)
    move_into_place(temporary, path)


def holder_of_this_process(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The lock file's content for this process: host, process id, Slurm job and its number of restarts."""
    restarts = number("SLURM_RESTART_COUNT", environment, default=0)
    job = slurm_job(environment)
    process = {"host": socket.gethostname(), "pid": os.getpid(), "slurm_job": job, "slurm_restarts": restarts}
    cluster = environment.get("SLURM_CLUSTER_NAME")
    return process if cluster is None else {**process, "slurm_cluster": cluster}


def is_successor(mine: Mapping[str, Any], holder: Mapping[str, Any]) -> bool:
    """Whether Slurm started this process to replace the lock's holder: the same job requeued, or that job has ended.

    Slurm ends or requeues a job whose node it cannot reach, while processes there may live on and keep their lock. The
    fence keeps those from writing.
    """
    if mine["slurm_job"] is None or holder.get("slurm_job") is None:
        return False
    if mine.get("slurm_cluster") != holder.get("slurm_cluster", mine.get("slurm_cluster")):
        return False  # this cluster's Slurm does not know the other's jobs, and would say that they are none
    if mine["slurm_job"] == holder["slurm_job"]:
        return mine["slurm_restarts"] > holder.get("slurm_restarts", 0)
    return has_ended(holder["slurm_job"])


def _lock(run_path: Path) -> IO[str]:
    """The run directory's lock file, locked until it is closed; opening it does not change an existing file.

    Raises UserError where another process holds the lock, unless this process is its successor, and where the file
    system has no locks.
    """
    lock = (run_path / LOCK).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        if is_successor(holder_of_this_process(), _holder(lock)):
            return lock
        lock.close()
        raise UserError(
            [
                f"run_dir={run_path} must not be in use by another live run; wait for it, or choose another "
                "name or run_dir"
            ]
        ) from None
    except OSError as error:
        lock.close()
        rule = f"must be on a file system that can lock files (flock), and it says: {error.strerror or error}"
        remedy = "choose another run_dir, or have it mounted with locks (Lustre: -o flock; NFS: a server that locks)"
        raise UserError([f"run_dir={run_path} {rule}; {remedy}"]) from None
    return lock


def _holder(lock: IO[str]) -> dict[str, Any]:
    """The holder that the lock file names; empty where the content is incomplete or damaged."""
    try:
        holder = json.loads(lock.read())
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}
