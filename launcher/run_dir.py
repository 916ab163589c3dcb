"""The run directory: what may and may not change between a run's starts."""

import dataclasses
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from data.places import why_not_writable
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.fence import Fence, raise_fence
from launcher.slurm.queue import has_ended, slurm_job
from parallel.checkpoint.folder import is_remote

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
LOCK = ".lock"

# Where token files lie and how many processes make them does not change which tokens come next.
FREE_DATA_KEYS = ("data.token_dir", "data.workers")


def saved_config(run_path: Path) -> RunConfig | None:
    """The config that the run was last started with, or None for a new run."""
    path = run_path / CONFIG
    return load_config(path) if path.is_file() else None


def checkpoints_of(path: Path | str) -> Path | str:
    """Where the checkpoints lie that a user means by ``path``: a run directory, or their own folder or URL."""
    if is_remote(path):
        return path
    run_path = Path(path)
    config = saved_config(run_path)
    if config is not None and config.checkpoint.dir is not None:
        return config.checkpoint.dir
    return run_path / CHECKPOINTS if (run_path / CHECKPOINTS).is_dir() else run_path


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
    """What changed since the run's last start; raises UserError where that makes it another run. Reads only."""
    old = saved_config(config.run_path)
    if old is None:
        return []
    changed = list(changes(old, config))
    problems = [
        f"{key}={_show(after)} must stay {_show(before)}, as the run in {config.run_path} was started with; "
        f"set it back, or start another run with another name or run_dir"
        for key, before, after in changed
        if _is_fixed(key)
    ]
    if type(old.optimizer) is not type(config.optimizer):
        problems.append(
            f"optimizer.name={config.optimizer.name} must stay {old.optimizer.name}, as the run in {config.run_path} "
            f"was started with; set it back, or start another run with another name or run_dir"
        )
    if problems:
        raise UserError(problems)
    return changed


def _is_fixed(key: str) -> bool:
    return key == "seed" or (key.startswith(("model", "data")) and key not in FREE_DATA_KEYS)


def _show(value: Any) -> str:
    """The value as YAML would have it in one line."""
    if dataclasses.is_dataclass(value):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return "{" + ", ".join(f"{name}: {_show(below)}" for name, below in fields) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(_show(part) for part in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def check_writable(config: RunConfig) -> None:
    """Raises UserError where the run directory cannot be made or written to. Changes nothing."""
    reason = why_not_writable(config.run_path)
    if reason is not None:
        raise UserError(
            [f"run_dir={config.run_path} must be a folder that can be written to, but {reason}; choose another run_dir"]
        )


def check_free(config: RunConfig) -> None:
    """Raises UserError where another process trains in the run directory. Changes nothing; one process calls it."""
    if (config.run_path / LOCK).exists():
        _lock(config.run_path).close()


class Claim:
    """The run directory as this start holds it, until ``close``. A context manager."""

    def __init__(self, lock: IO[str], fence: Fence) -> None:
        self.lock = lock
        self.fence = fence  # what the start's rank 0 writes under

    def close(self) -> None:
        """Lets the next start come."""
        self.lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def claim(config: RunConfig) -> Claim:
    """Creates the run directory with its config, and takes it for this start; keep what is returned.

    Whoever wrote in it before can do so no more. One process calls it. Raises UserError where another one trains in it.
    """
    run_path = config.run_path
    run_path.mkdir(parents=True, exist_ok=True)
    lock = _lock(run_path)
    fence = raise_fence(run_path)
    with fence.held():
        (run_path / CHECKPOINTS).mkdir(exist_ok=True)
        temporary = run_path / f"{CONFIG}.partial"
        temporary.write_text(dump_config(config))
        temporary.replace(run_path / CONFIG)
    lock.truncate(0)
    lock.write(json.dumps(holder_of_this_process()))
    lock.flush()
    return Claim(lock, fence)


def holder_of_this_process(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What the lock file says of the process that holds it."""
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    job = slurm_job(environment)
    return {"host": socket.gethostname(), "pid": os.getpid(), "slurm_job": job, "slurm_restarts": restarts}


def is_successor(mine: Mapping[str, Any], holder: Mapping[str, Any]) -> bool:
    """Whether Slurm started this process in the place of the lock's holder: one job, requeued since, or the next one.

    Slurm ends or requeues a job whose node it cannot reach, and whose processes may live on and keep their lock. The
    fence keeps them from writing.
    """
    if mine["slurm_job"] is None or holder.get("slurm_job") is None:
        return False
    if mine["slurm_job"] == holder["slurm_job"]:
        return mine["slurm_restarts"] > holder.get("slurm_restarts", 0)
    return has_ended(holder["slurm_job"])


def _lock(run_path: Path) -> IO[str]:
    """The run directory's lock file, locked until it is closed; what is there already keeps its time of change."""
    lock = (run_path / LOCK).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        if is_successor(holder_of_this_process(), json.loads(lock.read() or "{}")):
            return lock
        lock.close()
        raise UserError(
            [
                f"run_dir={run_path} must not be in use by another live run; wait for it, or choose another "
                "name or run_dir"
            ]
        ) from None
    return lock
