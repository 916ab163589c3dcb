"""The parts of a run directory: the name, the kind and the permitted content of each file and folder.

Commands check the parts here before they read or write them. A part that was damaged, replaced or badly copied is then
named in one line, before a command blocks on a named pipe, reads a huge file into memory or leaves a half-written one.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launcher.errors import UserError
from launcher.guard.fence import FENCE, why_no_token
from launcher.watch.metrics import read_rows
from parallel.checkpoint.store import step_of

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
LEDGER = "ledger.jsonl"
LOCK = ".lock"
STARTED_IN = ".started_in"
RUN_ID = ".run_id"  # the random id that the run drew at its first start
NEWEST = ".newest_checkpoint"
LINEAGE = "branched_from.json"
REPORT = "report.html"
WITHOUT = "without.jsonl"  # of a branched run, and the copy in a checkpoint of any run with data.without
REMOTE_TOKENS = "remote_tokens.json"  # record of the token files at URLs when the run began, as the stores told it
TOKEN_FILES = "token_files.json"  # record of the token files on this machine when the run began
LOGS = "logs"
WANDB = "wandb"
WANDB_ID = f"{WANDB}/run_id"
SLURM = "slurm"

Fault = Callable[[Path], str | None]  # the rule that a readable file's content breaks, or None

MOVE_AWAY = "move it away, or choose another name or run_dir"
NAMES = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def _json_in(text: bytes) -> Any:
    """The parsed JSON; None where the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _no_fault(path: Path) -> str | None:
    return None


def _why_no_rows(path: Path) -> str | None:
    try:
        for _ in read_rows(path):
            pass
    except UserError as error:
        return error.problems[0]
    return None


def _why_no_holder(path: Path) -> str | None:
    """The rule broken where the content is no holder's. Empty, or NUL bytes as a power cut leaves them, is right."""
    text = path.read_bytes().strip(b"\0 \n")
    if not text or isinstance(_json_in(text), dict):
        return None
    return f"{path} must hold what Roundtable writes of the process that trains there; remove it if none does"


def _why_no_folder_name(path: Path) -> str | None:
    if os.path.isabs(path.read_bytes().rstrip(b"\n")):
        return None
    return f"{path} must hold the folder that the run was started in; remove it"


def _why_no_run_id(path: Path) -> str | None:
    if re.fullmatch(rb"[0-9a-f]{32}\n", path.read_bytes()):
        return None
    return f"{path} must hold the name that the run drew at its first start; remove it, and it draws another"


def _why_no_checkpoint(path: Path) -> str | None:
    """The rule broken where it does not hold a checkpoint's name and the folder or URL that the checkpoint lies in."""
    name, _, location = path.read_bytes().partition(b"\n")
    if step_of(os.fsdecode(name)) is not None and location.rstrip(b"\n"):
        return None
    return f"{path} must name the run's newest checkpoint and the folder that it lies in; remove it"


def _why_no_names(path: Path) -> str | None:
    try:
        if all(re.fullmatch(r"[\w.,+=@-]+", line) for line in path.read_text().splitlines()):
            return None
    except UnicodeDecodeError:
        pass
    return f"{path} must hold the names of a sweep's runs, one a line; remove it, or submit the sweep again"


def _why_no_lineage(path: Path) -> str | None:
    """The rule broken where it does not hold a branch's parent run and step, or describes left-out documents badly."""
    found = _json_in(path.read_bytes())
    found = found if isinstance(found, dict) else {}
    without, run_id = found.get("without"), found.get("run_id")
    kinds = {"documents": (int,), "sha256": (str,), "first_seen": (int, type(None)), "known_from": (int,)}
    is_right = without is None or (
        isinstance(without, dict)
        and without.keys() == kinds.keys()
        and all(type(without[key]) in kind for key, kind in kinds.items())
    )
    place = type(found.get("run")), type(found.get("step"))
    if is_right and place == (str, int) and isinstance(run_id, str | None):
        return None
    return f"{path} must say the run and the step that this run was branched from; remove it"


def _why_no_records(path: Path) -> str | None:
    found = _json_in(path.read_bytes())
    kinds = {"url": str, "size": int, "version": str}
    if isinstance(found, dict) and all(
        isinstance(each, dict) and {name: type(value) for name, value in each.items()} == kinds
        for each in found.values()
    ):
        return None
    rule = "must hold what the stores said of the token files when the run began"
    return f"{path} {rule}; put it back, or remove it, and what they say now counts"


def _why_no_token_files(path: Path) -> str | None:
    """The rule broken where it does not hold one record for each token file, by source and by name."""
    found = _json_in(path.read_bytes())
    sources = list(found.values()) if isinstance(found, dict) else [None]
    if all(isinstance(each, dict) and all(isinstance(file, dict) for file in each.values()) for each in sources):
        return None
    rule = "must hold what the token files were when the run began"
    return f"{path} {rule}; put it back, or remove it, and what they are now counts"


def _why_no_id(path: Path) -> str | None:
    if re.fullmatch(rb"[\w-]*\n?", path.read_bytes()):
        return None
    return f"{path} must hold a W&B run's id; remove it, and the run goes on in a new W&B run"


@dataclass(frozen=True)
class Part:
    """One part of a run directory; it may be missing."""

    name: str  # below the run directory; may be a glob
    kind: Literal["file", "folder"]
    max_bytes: int | None = None  # the largest size of a part that is read whole
    fault: Fault = _no_fault  # without max_bytes, it runs only before writing: otherwise the part's reader checks it
    may_dangle: bool = False  # a link to a file that does not exist yet is permitted


PARTS = (
    Part(CONFIG, "file", 4 << 20),
    Part(f"{CONFIG}.partial", "file"),
    Part(f"{STARTED_IN}.partial", "file"),
    Part(METRICS, "file", fault=_why_no_rows),
    Part(f"{METRICS}.tmp", "file"),
    Part(LEDGER, "file", fault=_why_no_rows),
    Part(f"{LEDGER}.tmp", "file"),
    Part(LOCK, "file", 1 << 16, _why_no_holder),
    Part(FENCE, "file", 1 << 16, why_no_token),
    Part(STARTED_IN, "file", 1 << 16, _why_no_folder_name),
    Part(RUN_ID, "file", 1 << 10, _why_no_run_id),
    Part(f"{RUN_ID}.partial", "file"),
    Part(NEWEST, "file", 1 << 16, _why_no_checkpoint),
    Part(f"{NEWEST}.partial", "file"),
    Part(LINEAGE, "file", 1 << 16, _why_no_lineage),
    Part(REPORT, "file"),
    Part(WITHOUT, "file", 1 << 24),
    Part(REMOTE_TOKENS, "file", 1 << 24, _why_no_records),
    Part(f"{REMOTE_TOKENS}.partial", "file"),
    Part(TOKEN_FILES, "file", 1 << 24, _why_no_token_files),
    Part(f"{TOKEN_FILES}.partial", "file"),
    Part(".seen", "file", 1 << 16),
    Part(CHECKPOINTS, "folder"),
    Part(LOGS, "folder"),
    Part(f"{LOGS}/rank-*", "file"),
    Part(f"{LOGS}/job-*.log", "file", may_dangle=True),  # in a sweep, before its task has begun
    Part(WANDB, "folder"),
    Part(WANDB_ID, "file", 1 << 10, _why_no_id),
    Part(SLURM, "folder"),
    Part(f"{SLURM}/{CONFIG}", "file", 4 << 20),
    Part(f"{SLURM}/runs.txt", "file", 4 << 20, _why_no_names),
    Part(f"{SLURM}/train.sbatch", "file", 4 << 20),
    Part("preflight", "folder"),
)


def check_parts(run_path: Path, *names: str, writing: bool = False) -> None:
    """Raises UserError with a line for each part that is not what it must be; a missing part is no error.

    ``names`` are the parts that the caller is about to read, each with what lies below it; without names, all parts are
    checked. ``writing``: this user must also have the right to write them. Reads only.
    """
    problems = [line for part in _chosen(names) for line in _problems(run_path, part, writing)]
    if problems:
        raise UserError(problems)


def _chosen(names: tuple[str, ...]) -> Iterator[Part]:
    for part in PARTS:
        if not names or any(part.name == name or part.name.startswith(f"{name}/") for name in names):
            yield part


def _problems(run_path: Path, part: Part, writing: bool) -> Iterator[str]:
    folder, name = (run_path / part.name).parent, Path(part.name).name
    if folder != run_path and not os.path.isdir(folder):  # which has its own line
        return
    for path in sorted(folder.glob(name)) if "*" in name else [folder / name]:
        problem = _why_wrong(path, part, writing)
        if problem is not None:
            yield problem


def _why_wrong(path: Path, part: Part, writing: bool) -> str | None:
    """The line that says what is wrong with one path; None where it is right, or not there."""
    rule = f"{path} must be a {part.kind}"
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        dangles = path.is_symlink() and not part.may_dangle
        return f"{rule}, and is a link to what does not exist; {MOVE_AWAY}" if dangles else None
    except OSError as error:
        reason = "is a link that leads back to itself" if error.errno == errno.ELOOP else f"is not ({error.strerror})"
        return f"{rule}, and {reason}; {MOVE_AWAY}"
    if stat.S_IFMT(found.st_mode) != (stat.S_IFDIR if part.kind == "folder" else stat.S_IFREG):
        return f"{rule}, and is {NAMES.get(stat.S_IFMT(found.st_mode), 'a device')}; {MOVE_AWAY}"
    wanted = os.R_OK | (os.X_OK if part.kind == "folder" else 0) | (os.W_OK if writing else 0)
    if not os.access(path, wanted):
        rights = "read and written" if writing else "read"
        return f"{rule} that can be {rights} by this user, and is not; change its owner or rights, or {MOVE_AWAY}"
    if part.max_bytes is not None and found.st_size > part.max_bytes:
        return f"{rule} of at most {part.max_bytes:,} bytes, and has {found.st_size:,}; {MOVE_AWAY}"
    return part.fault(path) if writing or part.max_bytes is not None else None
