"""`roundtable status`, `logs` and `cancel`: follows and ends runs from where they were submitted."""

import os
import shlex
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.console import in_a_line, say
from launcher.errors import UserError
from launcher.slurm.queue import LiveJob, SlurmError, ask, live_jobs, require, runs_of
from launcher.tables import loss_text
from launcher.training.run_dir import checkpoints_of, refusing_unreachable, saved_config
from launcher.training.run_parts import CHECKPOINTS, CONFIG, LOGS, METRICS, SLURM, check_parts
from launcher.watch.metrics import encode_json, read_metrics
from parallel.checkpoint.places import open_store

POLL_SECONDS = 0.5  # between two looks at a log that is followed
JOB_POLL_SECONDS = 15  # between two questions to Slurm whether its job still lives


def print_status(run: str | None, *, as_json: bool) -> int:
    """Prints progress and jobs of a run, of each run of a sweep, or (None) of all runs with live jobs. Returns 0."""
    require("squeue")
    jobs = _live(None)
    path = find_run(run) if run is not None else None
    run_paths = runs_of(path) if path is not None else list(dict.fromkeys(job.run_path for job in jobs))
    of_each = [(each, [job for job in jobs if job.run_path == each.absolute()]) for each in run_paths]
    look = status if run_paths == [path] else status_or_problems  # one damaged run does not hide the others
    found = [look(each, its_jobs) for each, its_jobs in of_each]
    if as_json:
        say(encode_json(found[0] if run_paths == [path] else found, indent=2))
    elif not found:
        say("no run has a job that is queued or running")
    else:
        say("\n".join(line for each in found for line in lines(each)))
    return 0


def status(run_path: Path, jobs: list[LiveJob]) -> dict[str, Any]:
    """The run's progress as a tree for JSON, unknown values None. Raises UserError where a part is damaged."""
    check_parts(run_path, CHECKPOINTS, LOGS, METRICS, SLURM)
    config = saved_config(run_path)
    metrics = run_path / METRICS
    updates = [row for row in read_metrics(metrics) if "loss" in row] if metrics.exists() else []
    last = updates[-1] if updates else {}
    checkpoints = names_of_checkpoints(run_path)
    return {
        "run_dir": str(run_path),
        "step": last.get("step"),
        "steps": config.train.steps if config is not None else None,
        "loss": last.get("loss"),
        "tokens_per_second": last.get("tokens_per_second"),
        "last_step_seconds_ago": round(max(0.0, time.time() - metrics.stat().st_mtime), 1) if updates else None,
        "checkpoint": checkpoints[-1] if checkpoints else None,
        "jobs": rows_of(jobs),
        "last_word": last_word(run_path),
    }


def status_or_problems(run_path: Path, jobs: list[LiveJob]) -> dict[str, Any]:
    """The run's status; for a damaged run only its jobs and a line for each damaged part."""
    try:
        return status(run_path, jobs)
    except UserError as error:
        return {"run_dir": str(run_path), "problems": error.problems, "jobs": rows_of(jobs)}


def rows_of(jobs: list[LiveJob]) -> list[dict[str, str]]:
    """The jobs as trees for JSON."""
    names = ("job_id", "state", "reason", "nodes", "elapsed", "limit")
    return [{name: getattr(job, name) for name in names} for job in jobs]


def names_of_checkpoints(run_path: Path) -> list[str]:
    """The names of a run's checkpoints, oldest first; empty where their object store does not answer."""
    location = checkpoints_of(run_path)
    with suppress(UserError), refusing_unreachable("checkpoint.dir", location):
        return open_store(location).names()
    return []


def last_word(run_path: Path) -> str | None:
    """The newest line of the job script's own log."""
    path = log_path(run_path, None)
    said = path.read_text(errors="replace").split("\n") if path is not None else []
    return next((line for line in reversed(said) if line.strip()), None)


def lines(status: dict[str, Any]) -> list[str]:
    """A status, as ``status`` returns it, as lines of text."""
    if "problems" in status:
        told = [f"{status['run_dir']}: damaged", *(f"  {in_a_line(line)}" for line in status["problems"])]
    else:
        told = [f"{status['run_dir']}: {progress(status)}", f"  checkpoint: {status['checkpoint'] or 'none yet'}"]
    for job in status["jobs"]:
        where = f"on {job['nodes']}" if job["nodes"] else f"waits: {job['reason']}"
        told.append(f"  job {job['job_id']}: {job['state']} {where}, {job['elapsed']} of {job['limit']}")
    if not status["jobs"]:
        told.append("  no job is queued or running")
    if status.get("last_word") is not None:
        told.append(f"  last line of the job's log: {status['last_word']}")
    return told


def progress(status: dict[str, Any]) -> str:
    """The progress of an undamaged run in words: step, loss, speed, and the age of the last step."""
    if status["step"] is None:
        return "no step yet"
    pace = status["tokens_per_second"]
    return (
        f"step {status['step']} of {status['steps'] or 'unknown'}, loss {loss_text(status['loss'])}, "
        f"{'unknown' if pace is None else f'{pace:,.0f}'} tokens/s, {status['last_step_seconds_ago']:.0f} s ago"
    )


def print_log(run: str, rank: int | None, n_lines: int, *, follow: bool) -> int:
    """Prints the last ``n_lines`` of a rank's log, or of the job script's (rank None). Returns 0.

    With ``follow``, goes on printing until the run has no live job. Raises UserError where there is no such log, or
    ``run`` is a sweep of several runs.
    """
    run_path = find_run(run)
    runs = runs_of(run_path)
    if runs != [run_path]:
        raise UserError([f"RUN={run} is a sweep of {len(runs)} runs; name one of them, e.g. {runs[0]}"])
    check_parts(run_path, LOGS)
    path = log_path(run_path, rank)
    if path is None:
        found = f"{run_path}/logs holds no log of {_whose(rank)}: ranks on this machine print to its terminal"
        raise UserError(
            [f"{found}, and a job's write one once it has begun; see `roundtable status {shlex.quote(run)}`"]
        )
    with path.open(errors="replace") as log:
        for line in deque(log, maxlen=n_lines):
            say(line, end="")
        asked = 0.0
        while follow:
            say(log.read(), end="")
            if time.monotonic() - asked > JOB_POLL_SECONDS:
                asked = time.monotonic()
                follow = bool(_live(run_path))
            time.sleep(POLL_SECONDS)
        say(log.read(), end="")
    return 0


def log_path(run_path: Path, rank: int | None) -> Path | None:
    """The newest log of that rank, or (None) of the job scripts; None where there is none."""
    pattern = "job-*.log" if rank is None else f"rank-{rank}.log"
    found = [path for path in (run_path / "logs").glob(pattern) if path.exists()]  # a link, before its task has begun
    paths = sorted(found, key=lambda path: path.stat().st_mtime)
    return paths[-1] if paths else None


def _whose(rank: int | None) -> str:
    return "a job" if rank is None else f"rank {rank}"


def cancel_run(run: str, *, save: bool) -> int:
    """Cancels the jobs of a run or a sweep; with ``save``, running ones are told to save and stop. Returns 0."""
    require("squeue", "scancel")
    jobs = jobs_of(run)
    jobs.sort(key=lambda job: job.state != "PENDING")  # first those that would begin when the running one ends
    for job in jobs:
        if save and job.state == "RUNNING":
            ask("scancel", "--batch", "--signal=USR2", job.job_id)
            say(f"job {job.job_id}: told to save and stop; `roundtable status {shlex.quote(run)}` says when it has")
        else:
            ask("scancel", job.job_id)
            say(f"job {job.job_id}: cancelled")
    return 0


def jobs_of(run: str) -> list[LiveJob]:
    """The live jobs of a run or a sweep, even where its directory is gone or damaged. Raises UserError for none."""
    try:
        places = [find_run(run)]
        refusal = UserError([f"{places[0]} has no queued or running job to cancel; see `roundtable status`"])
    except UserError as error:
        places, refusal = places_of(run), error
    jobs = next((jobs for path in places if (jobs := _live(path))), None)
    if jobs is None:
        raise refusal
    return jobs


def places_of(run: str) -> list[Path]:
    """The directories that a user may mean by ``run``: the path itself, or the run of that name below runs/."""
    return [Path(run), Path("runs") / run]


def find_run(run: str) -> Path:
    """The directory of a run or a sweep, given its path or its name. Raises UserError where there is none."""
    for path in places_of(run):
        if any(os.path.lexists(path / name) for name in (CONFIG, SLURM)):
            check_parts(path, CONFIG, SLURM)
            return path
    raise UserError([f"RUN={run} must be a run directory, or a run's name below runs; check it"])


def _live(run_path: Path | None) -> list[LiveJob]:
    try:
        return live_jobs(run_path)
    except SlurmError as error:
        raise UserError([f"Slurm does not answer: {error}; try again later"]) from None
