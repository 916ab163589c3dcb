"""Asks Slurm's commands about partitions, live jobs, and whether a job has ended or would be accepted."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import UserError
from launcher.slurm.config import SlurmConfig
from launcher.slurm.script import COMMENT, RUNS
from launcher.slurm.shell import default_partition, for_sbatch
from launcher.training.run_parts import SLURM, check_parts

NOT_NOW = "Requested node configuration is not available"  # Slurm's message where nodes are down, and where none fit
SECONDS = 60  # timeout of a command: a busy slurmctld may take long to answer, one that is down never does


@dataclass(frozen=True)
class Partition:
    """A partition as sinfo describes it; GPUs are the most that any of its nodes has."""

    name: str
    nodes: int
    gpus_per_node: int
    max_minutes: int | None  # None: no limit


@dataclass(frozen=True)
class LiveJob:
    """A job in the queue that trains a run."""

    job_id: str  # 12, or 12_3 in an array
    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str  # why it waits
    nodes: str  # where it runs: n[1-4]
    elapsed: str
    limit: str
    run_path: Path
    submitted: Path  # the directory that was submitted: the run's, or that of the sweep that it belongs to


class SlurmError(Exception):
    """A Slurm command failed or timed out; the message is the command's own."""


def require(*programs: str) -> None:
    """Raises UserError where one of these Slurm commands is not on the PATH."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise UserError([f"{missing[0]} must be on the PATH, and is not; run this where Slurm is, on a login node"])


def ask(
    *command: str, text: str | None = None, environment: Mapping[str, str] | None = None, with_stderr: bool = False
) -> str:
    """Runs a command and returns its stdout. Raises SlurmError, with the command's message, where it fails.

    ``text`` is its stdin. ``environment``: its variables; None: those of this process, without the user's own choice of
    what Slurm lists (SQUEUE_PARTITION, SINFO_FORMAT, ...). ``with_stderr``: what it says on stderr follows stdout.
    """
    if environment is None:
        environment = {name: each for name, each in os.environ.items() if not name.startswith(("SQUEUE_", "SINFO_"))}
    how = {"input": text, "env": environment, "timeout": SECONDS}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]} did not answer within {SECONDS} s") from None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [""])[-1].removeprefix(f"{command[0]}: ")
        raise SlurmError(words or f"{command[0]} failed with code {done.returncode}")
    return done.stdout + (done.stderr if with_stderr else "")


def partitions() -> tuple[dict[str, Partition], str | None]:
    """Every partition by its name, hidden ones too, and the default one's name."""
    found: dict[str, Partition] = {}
    default = None
    for line in ask("sinfo", "-h", "-a", "-o", "%P|%D|%G|%l").splitlines():
        name, nodes, gres, limit = line.split("|")
        if name.endswith("*"):
            name = default = name[:-1]
        old = found.get(name, Partition(name, 0, 0, None))
        found[name] = Partition(
            name,
            old.nodes + int(nodes),
            max(old.gpus_per_node, gpus_of(gres)),
            minutes_of(limit),
        )
    return found, default


def gpus_of(gres: str) -> int:
    """The number of GPUs in sinfo's %G of a node: gpu:8, gpu:h100:4(S:0-1),shard:2, (null)."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d+)", gres)
    return sum(map(int, counts))


def gpu_types(partition: str | None) -> list[str]:
    """The kinds of GPU that sinfo names in a partition (h100 for gpu:h100:8), or in several, separated by commas.

    None means the default partition.
    """
    found: dict[str, None] = {}
    named = partition or default_partition()
    names = named.split(",") if named is not None else []
    for line in ask("sinfo", "-h", "-a", "-o", "%P|%G").splitlines():
        name, _, gres = line.partition("|")
        if name.rstrip("*") in names or (not names and name.endswith("*")):
            found |= dict.fromkeys(re.findall(r"(?:^|,)gpu:([^:,()\d][^:,()]*):\d+", gres))
    return list(found)


def nodes_up(partition: str | None) -> int | None:
    """The nodes of a partition that are neither down nor drained; of several, the most that one has.

    None for ``partition`` means the default one. None where sinfo does not say.
    """
    found: dict[str, int] = {}
    named = partition or default_partition()
    for line in ask("sinfo", "-h", "-a", "-o", "%P|%F").splitlines():
        name, _, counts = line.partition("|")
        match = re.fullmatch(r"(\d+)/(\d+)/\d+/\d+", counts)  # allocated, idle, other, all
        is_meant = name.rstrip("*") in named.split(",") if named is not None else name.endswith("*")
        if match is not None and is_meant:
            found[name] = found.get(name, 0) + int(match[1]) + int(match[2])
    return max(found.values(), default=None)


def minutes_of(limit: str) -> int | None:
    """Minutes of a time limit as Slurm prints it, days-hours:minutes:seconds; None where there is none."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", limit)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 1440 * days + 60 * hours + minutes + (1 if seconds else 0)


def live_jobs(run_path: Path | None = None) -> list[LiveJob]:
    """The user's Roundtable jobs in the queue, those in hidden partitions too, each task of an array by itself.

    With ``run_path``, the directory of a run or a sweep, only its jobs. Raises SlurmError where squeue fails.
    """
    jobs, runs_of_each = [], functools.cache(runs_of)
    for line in ask("squeue", "-h", "-a", "-r", "--me", "-o", "%i|%T|%r|%N|%M|%l|%k").splitlines():
        job_id, state, reason, nodes, elapsed, limit, comment = line.split("|", 6)
        if not comment.startswith(COMMENT):
            continue
        submitted = Path(comment.removeprefix(COMMENT))
        task = job_id.partition("_")[2]
        runs = runs_of_each(submitted)
        run = runs[int(task)] if task.isdigit() and int(task) < len(runs) else submitted
        job = LiveJob(job_id, state, reason, nodes, elapsed, limit, run, submitted)
        if run_path is None or run_path.absolute() in (job.run_path, job.submitted):
            jobs.append(job)
    return jobs


def runs_of(path: Path) -> list[Path]:
    """The run directories of a sweep, in the order of its tasks; for the directory of a single run only that one.

    A sweep whose list of runs is damaged counts as one run, so that a later ``check_parts`` of it reports the damage.
    """
    try:
        check_parts(path, SLURM)
    except UserError:
        return [path]
    listed = path / RUNS
    return [path / name for name in listed.read_text().splitlines()] if listed.exists() else [path]


def slurm_job(environment: Mapping[str, str] = os.environ) -> str | None:
    """The id of the job that this process belongs to: 12, or 12_3 for a task of an array; None outside of Slurm.

    Roundtable's job script sets ROUNDTABLE_JOB, since SLURM_JOB_ID of an array's last task is that of the whole array.
    """
    return environment.get("ROUNDTABLE_JOB") or environment.get("SLURM_JOB_ID")


def has_ended(job_id: str) -> bool:
    """Whether Slurm says that a job has ended; False where it does not answer, or cannot be asked from here."""
    try:
        return not ask(
            "squeue", "-h", "-j", job_id, "-t", "RUNNING,SUSPENDED,COMPLETING,CONFIGURING", "-o", "%i"
        ).strip()
    except (SlurmError, OSError) as error:
        return "Invalid job id" in str(error)  # Slurm removes jobs from its records some time after they ended


def would_take(script: str, slurm: SlurmConfig) -> str | None:
    """Why ``sbatch --test-only`` refuses the script, in its own words; None where it accepts it.

    It refuses what more nodes would take than are up now, too, which sbatch itself lets wait for them.
    """
    try:
        ask("sbatch", "--test-only", text=script, environment=for_sbatch(slurm))
    except SlurmError as error:
        up = nodes_up(slurm.partition) if NOT_NOW in str(error) else None
        return str(error) if up is None or up >= slurm.nodes + slurm.spare_nodes else None
    return None


def processors_of(script: str, slurm: SlurmConfig) -> int | None:
    """The number of processors that Slurm would give the job; None where ``sbatch --test-only`` does not say it."""
    said = ask("sbatch", "--test-only", text=script, environment=for_sbatch(slurm), with_stderr=True)
    found = re.search(r" using (\d+) processors on ", said)
    return int(found[1]) if found is not None else None
