"""`roundtable runs`: lists runs with their state, step, losses and size on disk, read from their directories alone.

Only the end of metrics.jsonl and a few keys of config.yaml are read, so that hundreds of long runs take a second or
two. Nothing is locked or changed, so that no start of a run is disturbed.
"""

import fcntl
import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.text import Text

from data.partial import is_partial
from launcher.console import in_a_line, say
from launcher.errors import UserError
from launcher.slurm.queue import runs_of
from launcher.tables import loss_text, plain_table, size_text, wide_console
from launcher.training.newest import read_newest
from launcher.training.run_dir import saved_config
from launcher.training.run_parts import CHECKPOINTS, CONFIG, LOCK, METRICS
from launcher.watch.metrics import encode_json
from parallel.checkpoint.places import is_remote, local_path
from parallel.checkpoint.store import in_order, step_of

RUNS_DIR = "runs"
PARTS_OF_A_RUN = (CONFIG, METRICS, CHECKPOINTS, LOCK, "slurm")
TAIL_BYTES = 1 << 20  # the end of metrics.jsonl that is searched for the last numbers
MOST_BYTES = 32 << 20  # searched where TAIL_BYTES hold no update: one of the largest models has some hundred kilobytes
HEAD_BYTES = 1 << 16  # the beginning that is searched for the first start
AXES = ("tp", "pp", "cp", "ep")


@dataclass
class RunSummary:
    """One run's state, progress and size; a value that is not known is None."""

    path: str
    state: str = "never started"  # running, finished, stopped, crashed, never started, damaged
    where: str | None = None  # of a running one: host and process, or Slurm job
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    checkpoints: int | None = 0
    newest_checkpoint: int | None = None
    bytes: int = 0
    changed: float = 0.0  # seconds since 1970
    layout: str | None = None
    problem: str | None = None


def print_runs(directories: list[str], *, as_json: bool) -> int:
    """Prints the runs in the directories, newest change first; returns 0."""
    found = list_runs(directories)
    if as_json:
        say(encode_json([asdict(run) for run in found], indent=2))
    elif not found:
        say(f"no run in {' or '.join(directories or [RUNS_DIR])}")
    else:
        print_table(found)
    return 0


def list_runs(directories: list[str]) -> list[RunSummary]:
    """The runs that each directory (default: runs) holds or is, the last changed first."""
    paths = dict.fromkeys(path for directory in directories or [RUNS_DIR] for path in run_paths(directory))
    return sorted((summarize(path) for path in paths if not is_partial(path)), key=lambda run: -run.changed)


def run_paths(directory: str, *, deep: bool = False) -> list[Path]:
    """The run directories that DIR is or holds, those of sweeps included; DIR may also be a run's name below runs.

    ``deep``: also those in folders that are no runs, at any depth; links to such folders are not followed. Raises
    UserError where DIR is no folder or cannot be read.
    """
    named = Path(RUNS_DIR) / directory
    root = named if named.is_dir() and not Path(directory).is_dir() else Path(directory)
    if not root.is_dir():
        if directory == RUNS_DIR and not os.path.lexists(root):
            return []
        raise UserError([f"DIR={directory} must be a folder of runs, or a run directory; check it"])
    if any(os.path.lexists(root / part) for part in PARTS_OF_A_RUN):
        return runs_of(root)
    try:
        paths = sorted(root.iterdir())
    except PermissionError:
        rule = "must be a folder that this user may read"
        raise UserError([f"DIR={directory} {rule}; give the right to it, or choose another"]) from None
    found: list[Path] = []
    for path in paths:
        if _is_run(path):
            found += runs_of(path)
        elif deep and path.is_dir() and not path.is_symlink():
            found += run_paths(str(path), deep=True)
    return found


def _is_run(path: Path) -> bool:
    try:
        return path.is_dir() and any(os.path.lexists(path / part) for part in PARTS_OF_A_RUN)
    except OSError:
        return True  # it cannot be looked into: its summary says why


def summarize(path: Path) -> RunSummary:
    """The summary of one run; where its directory is damaged, ``state`` says so, and ``problem`` why, in a line."""
    run = RunSummary(str(path))
    try:
        _look(path, run)
    except UserError as error:
        run.state, run.problem = "damaged", error.problems[0]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        run.state, run.problem = "damaged", f"{getattr(error, 'filename', None) or path}: {reason}"
    return run


def _look(path: Path, run: RunSummary) -> None:
    run.bytes, run.changed = tree_size(path)
    config = config_values(path)
    run.steps = int(config["train.steps"]) if "train.steps" in config else None
    _read_checkpoints(path, config.get("checkpoint.dir", "null"), run)
    start = _read_metrics(path / METRICS, run)
    run.layout = layout_words(config, start)
    run.where = running_where(path)
    run.state = _state(run, start)
    if run.state != "never started" and not config:
        raise UserError([f"{path / CONFIG} is missing; put it back from a checkpoint's copy"])


def _state(run: RunSummary, start: Mapping[str, Any]) -> str:
    if run.where is not None:
        return "running"
    if run.step is not None and run.steps is not None and run.step >= run.steps:
        return "finished"
    if start.get("stopped"):
        return "stopped"
    return "never started" if run.step is None and not start else "crashed"


def tree_size(path: Path) -> tuple[int, float]:
    """The bytes that a folder takes on disk, links not followed, and its last change, in seconds since 1970."""
    size, changed = 0, 0.0
    for folder, _, files in os.walk(path):
        for name in files:
            try:
                found = os.lstat(os.path.join(folder, name))
            except OSError:  # removed meanwhile
                continue
            size, changed = size + found.st_blocks * 512, max(changed, found.st_mtime)
    return size, changed or path.stat().st_mtime


def config_values(path: Path) -> dict[str, str]:
    """The single values of a run's saved config by dotted key, as written; empty where there is no config.

    Roundtable writes this file with one key a line, which is quick to read. A file that looks different is loaded like
    any config, which takes a hundred times longer and raises UserError where it is damaged; then only a few keys are
    returned.
    """
    saved = path / CONFIG
    if not is_file(saved):
        return {}
    values: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in saved.read_text(errors="replace").splitlines():
        match = re.fullmatch(r"( *)(\w+):(?: (.*))?", line)
        if match is None:
            continue
        indent, key, value = len(match[1]), match[2], match[3]
        above = [(depth, name) for depth, name in above if depth < indent]
        values[".".join([name for _, name in above] + [key])] = value or ""
        above.append((indent, key))
    if re.fullmatch(r"\d+", values.get("train.steps", "")):
        return values
    config = saved_config(path)
    assert config is not None
    axes = {f"parallel.{axis}": str(getattr(config.parallel, axis)) for axis in (*AXES, "zero")}
    return {"train.steps": str(config.train.steps), "checkpoint.dir": config.checkpoint.dir or "null", **axes}


def is_file(path: Path) -> bool:
    """Whether the file exists. Raises UserError where it is no regular file: reading a pipe could wait for ever."""
    if not os.path.lexists(path):
        return False
    if not stat.S_ISREG(path.stat().st_mode):
        raise UserError([f"{path} must be a file, and is something else; move it away"])
    return True


def _read_checkpoints(path: Path, location: str, run: RunSummary) -> None:
    """Sets the number of checkpoints and the newest in ``run``; at a URL only the newest that the run has recorded."""
    location = location.strip("\"'")
    if is_remote(location):
        newest = read_newest(path)
        run.checkpoints, run.newest_checkpoint = None, newest and step_of(newest.name)
        return
    folder = path / CHECKPOINTS if location == "null" else local_path(location)
    if not os.path.lexists(folder):
        return
    names = in_order(os.listdir(folder))
    run.checkpoints = len(names)
    run.newest_checkpoint = step_of(names[-1]) if names else None


def _read_metrics(path: Path, run: RunSummary) -> dict[str, Any]:
    """Sets the last update's and evaluation's numbers in ``run``; returns the last start event, with key ``stopped``.

    Raises UserError where none of the file's last three lines is a row.
    """
    if not is_file(path):
        return {}
    found: dict[str, Any] = {}
    for size in (TAIL_BYTES, MOST_BYTES):
        lines = last_lines(path, size)
        found = _read_tail(lines, run)
        if len(lines) >= 3 and not any(_parse(line) for line in lines[-3:]):
            raise UserError([f"{path}: its last lines are not rows (JSON objects with a step); remove them"])
        if run.step is not None:
            break
    return found if "ranks" in found else {**first_start(path), **found}


def _read_tail(lines: list[bytes], run: RunSummary) -> dict[str, Any]:
    """Sets the last update's and evaluation's numbers in ``run`` from these lines; returns their last start event."""
    stopped, start = False, dict[str, Any]()
    for line in reversed(lines):
        if run.step is not None and not any(word in line for word in (b'"eval_loss"', b'"start"')):
            continue  # an earlier update, which need not be parsed
        row = _parse(line) or {}
        if "loss" in row:
            run.step, run.loss = (row["step"], _number(row["loss"])) if run.step is None else (run.step, run.loss)
        elif "eval_loss" in row:
            run.eval_loss = _number(row["eval_loss"]) if run.eval_loss is None else run.eval_loss
        elif row.get("event") == "start":
            start = start or row
        elif row.get("event") == "stopped" and not start:
            stopped = run.step is None
        if run.step is not None and run.eval_loss is not None and start:
            break
    return {**start, "stopped": stopped} if start or stopped else {}


def last_lines(path: Path, size: int) -> list[bytes]:
    """The lines in the last ``size`` bytes of a file, the first of them whole; a torn last line too."""
    with path.open("rb") as file:
        position = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(position)
        lines = file.read(size).split(b"\n")
    return [line for line in lines[1 if position else 0 :] if line.strip()]


def first_start(path: Path) -> dict[str, Any]:
    """The event of the run's first start; empty where it is not among the first lines."""
    with path.open("rb") as file:
        rows = [_parse(line) for line in file.read(HEAD_BYTES).splitlines()]
    return next((row for row in rows if row is not None and row.get("event") == "start"), {})


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def running_where(path: Path) -> str | None:
    """The process or Slurm job that trains in the run directory; None where none does.

    A training process holds a lock on the run. For one on this machine the kernel's list of locks is read. One on
    another machine counts as running if the run's metrics were written in the last ten minutes.
    """
    lock = path / LOCK
    if not is_file(lock):
        return None
    try:
        holder, inode = json.loads(lock.read_text() or "{}"), lock.stat().st_ino
    except ValueError:
        return None
    if not isinstance(holder, dict) or "pid" not in holder:
        return None
    where = f"job {holder['slurm_job']}" if holder.get("slurm_job") else f"{holder.get('host')}, pid {holder['pid']}"
    if holder.get("host") != socket.gethostname():
        return where if _wrote_lately(path) else None
    return where if holds_lock(holder["pid"], inode) else None


def holds_lock(pid: int, inode: int, locks: Path = Path("/proc/locks")) -> bool:
    """Whether the process holds a lock on the file, by the kernel's list; without a usable list, whether it lives."""
    try:
        lines = locks.read_text().splitlines()
    except OSError:
        lines = []
    if not lines and not _lists_locks(locks):
        return _lives(pid)
    return any(
        fields[4] == str(pid) and fields[5].rpartition(":")[2] == str(inode)
        for fields in (line.replace("-> ", "").split() for line in lines)
        if len(fields) > 5
    )


@cache
def _lists_locks(locks: Path) -> bool:
    """Whether the kernel's list shows a lock that this process holds; some kernels always show an empty list."""
    with tempfile.TemporaryFile() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            return str(os.getpid()) in locks.read_text().split()
        except OSError:
            return False


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


WROTE_LATELY_SECONDS = 600


def _wrote_lately(path: Path) -> bool:
    try:
        return time.time() - (path / METRICS).stat().st_mtime < WROTE_LATELY_SECONDS
    except OSError:
        return False


def layout_words(config: Mapping[str, str], start: Mapping[str, Any]) -> str | None:
    """Ranks of the last start and the axes above one: `4 ranks, tp 2, ZeRO 1`."""
    if "parallel.zero" not in config:
        return None
    words = [f"{start['ranks']} rank{'s' if start['ranks'] != 1 else ''}"] if "ranks" in start else []
    words += [f"{axis} {config[f'parallel.{axis}']}" for axis in AXES if config.get(f"parallel.{axis}", "1") != "1"]
    return ", ".join([*words, f"ZeRO {config['parallel.zero']}"])


def print_table(found: list[RunSummary]) -> None:
    """Prints the runs as a table, with fewer columns on a narrow terminal; then a line on each running or bad one."""
    console = wide_console()
    wide = console.width >= 110
    titles = ["run", "state", ">step", ">loss", ">held out", ">size", ">changed" if wide else ">ago"]
    table = plain_table(*titles, *([">checkpoints", "layout"] if wide else []))
    for column in table.columns[1:]:
        column.no_wrap = True
    now = time.time()
    for run in found:
        cells = [Text(short_name(run)), Text(run.state, STYLES[run.state]), _steps(run), _loss(run.loss)]
        cells += [_loss(run.eval_loss), size_text(run.bytes), _ago(now - run.changed) + (" ago" if wide else "")]
        table.add_row(*cells, *([_checkpoints(run), run.layout or ""] if wide else []))
    console.print(table)
    for run in found:
        name = run.path
        told = [] if run.where is None else [f"{name} is running: {run.where}"]
        if run.problem is not None:
            told.append(run.problem if run.problem.startswith(name) else f"{name}: {run.problem}")
        for line in told:
            console.print(Text(in_a_line(line)))


def short_name(run: RunSummary) -> str:
    """The name by which other commands find the run: its name below runs, or its path."""
    return in_a_line(run.path.removeprefix(f"{RUNS_DIR}/"))


def short_names(paths: Sequence[Path]) -> list[str]:
    """For files in several runs, the name of each run's folder, with as many parent folders as tell the runs apart."""
    parts = [Path(os.path.abspath(path)).parent.parts for path in paths]
    length = next(n for n in range(1, 999) if len({part[-n:] for part in parts}) == len(set(parts)))
    return ["/".join(part[-length:]) for part in parts]


STYLES = {
    "running": "bold green",
    "finished": "green",
    "stopped": "yellow",
    "crashed": "red",
    "never started": "dim",
    "damaged": "bold red",
}


def _steps(run: RunSummary) -> str:
    if run.step is None:
        return ""
    return f"{run.step}/{run.steps}" if run.steps is not None else str(run.step)


def _loss(value: float | None) -> str:
    return "" if value is None else loss_text(value)


def _checkpoints(run: RunSummary) -> str:
    if run.checkpoints is None:
        return "" if run.newest_checkpoint is None else f"to step {run.newest_checkpoint}"
    return str(run.checkpoints or "")


def _ago(seconds: float) -> str:
    """How long ago, in its largest unit."""
    if seconds < 3600:
        return f"{max(seconds, 0) / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172800 else f"{seconds / 86400:.0f} days"
