"""`roundtable profile CONFIG`: where a training step's time goes, measured here or estimated for a GPU."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.places import why_no_path, why_not_writable
from launcher.config.checked import fewest_ranks, load_checked
from launcher.config.tree import RunConfig
from launcher.console import say, tell
from launcher.errors import UserError, why_refused
from launcher.estimate.command import answer_of
from launcher.limits import check_limits, check_local_ranks
from launcher.training.start import check_gpus, check_ranks, default_ranks
from parallel.processes.world import set_rank_environment, world_size_from_environment

QUIET = {"KINETO_LOG_LEVEL": "99"}  # otherwise torch's profiler prints when it begins and ends


@dataclass(frozen=True)
class Wishes:
    """What the command line says besides the config."""

    out: str | None
    ranks: int | None
    steps: int
    warmup: int
    as_json: bool


def profile_config(path: Path, overrides: Sequence[str], gpu: str | None, wishes: Wishes) -> int:
    """Profiles a few steps, writes the folder OUT, prints the table or JSON, and returns the exit code.

    They are measured here by local processes or the surrounding job, or estimated for ``gpu``. Raises UserError where
    an argument or the config is wrong.
    """
    if wishes.steps < 1 or wishes.warmup < 0:
        rule = "--steps must be at least 1 and --warmup at least 0"
        raise UserError([f"--steps={wishes.steps} --warmup={wishes.warmup}: {rule}; try --steps 3 --warmup 2"])
    if gpu is not None:
        if wishes.ranks is not None:
            remedy = "leave out --ranks: the job's size is the config's (slurm.nodes, slurm.gpus_per_node)"
            raise UserError([f"--as={gpu} starts no processes, and --ranks={wishes.ranks} asks for some; {remedy}"])
        return estimate(path, overrides, gpu, wishes)
    job_size = world_size_from_environment()
    os.environ.update({**QUIET, **os.environ})
    if job_size is not None:
        check_ranks(wishes.ranks, job_size)
        return profile_in_job(path, overrides, job_size, wishes)
    check_local_ranks(wishes.ranks)
    n_ranks = wishes.ranks or default_ranks()
    check_limits(n_ranks)
    config = load_checked(path, overrides, world_size=n_ranks, data=False)
    check_gpus(n_ranks)
    out = checked_out(config, wishes.out)
    return profile_here(config, n_ranks, out, wishes)


def checked_out(config: RunConfig, out: str | None) -> Path:
    """The output folder. Raises UserError where it cannot be made, or exists and is not empty."""
    folder = Path(out if out is not None else f"profile-{config.name}")
    rule = why_no_path(str(folder)) or why_not_writable(folder)
    if rule is None and folder.exists() and any(folder.iterdir()):
        rule = "must be a new folder or an empty one, and holds files"
    if rule is not None:
        raise UserError([f"--out={folder} {rule}; choose another folder, or move it away"])
    return folder


def profile_here(config: RunConfig, n_ranks: int, out: Path, wishes: Wishes) -> int:
    """Profiles with local processes and returns the exit code; where they fail, OUT is left as it was before."""
    from launcher.profile.run import Plan
    from parallel.processes.start import RankError, run_ranks

    was_there = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    plan = Plan(out.absolute(), wishes.warmup, wishes.steps)
    try:
        found = run_ranks(profile_rank, n_ranks, config, plan, preload=["launcher.profile.run"])
    except BaseException as error:
        for path in out.iterdir() if was_there else ():
            path.unlink()
        if not was_there:
            shutil.rmtree(out)
        if not isinstance(error, RankError):
            raise
        if error.exit_code != 2:  # else the rank has printed its lines
            tell(error)
        return error.exit_code
    return conclude(config, found, out, as_json=wishes.as_json)


def profile_rank(config: RunConfig, plan: Any) -> Any:
    """One local process's part of `profile`; a user's mistake ends it with exit code 2."""
    from launcher.profile import run
    from parallel.processes.start import tell_launcher

    try:
        return run.profile_rank(config, plan, tell)
    except (DataError, UserError) as error:
        tell(error)
        raise SystemExit(2) from None
    except OSError as error:
        line = why_refused(error)
        if line is None:
            raise
        tell_launcher(line, 1)
        raise SystemExit(1) from None


def profile_in_job(path: Path, overrides: Sequence[str], job_size: int, wishes: Wishes) -> int:
    """Profiles as one rank of a torchrun or srun job, on all of whose ranks it must run; rank 0 writes and prints."""
    from parallel.processes.lifeline import end_with_job

    end_with_job()
    config = load_checked(path, overrides, world_size=job_size, data=False)
    out = checked_out(config, wishes.out)
    set_rank_environment()
    from launcher.profile.run import Plan, profile_job

    out.mkdir(parents=True, exist_ok=True)
    found = profile_job(config, Plan(out.absolute(), wishes.warmup, wishes.steps), tell)
    return conclude(config, found, out, as_json=wishes.as_json) if found else 0


def conclude(config: RunConfig, found: Any, out: Path, *, as_json: bool) -> int:
    """Writes the report and the picture of memory into OUT, and prints the report; returns 0."""
    from launcher.profile.measured import draw, report_of

    report = report_of(config, found, out)
    draw(config, found, out)
    return publish(report, out, as_json=as_json)


def publish(report: dict[str, Any], out: Path, *, as_json: bool) -> int:
    """Writes the report to OUT/profile.json and prints it as a table or JSON; returns 0."""
    text = json.dumps(report, indent=2)
    (out / "profile.json").write_text(text + "\n")
    if as_json:
        say(text)
    else:
        from launcher.profile.report import print_report

        print_report(report)
        say(f"\n{out}: {', '.join(sorted(each.name for each in out.iterdir()))}")
    return 0


def estimate(path: Path, overrides: Sequence[str], gpu: str, wishes: Wishes) -> int:
    """Estimates the profile for ``gpu`` in a child process, which sets up a CUDA device before it imports torch."""
    from launcher.estimate.step import check_known
    from launcher.trace.hardware import read_hardware

    hardware = read_hardware(gpu)
    config, world_size = load_for_job(path, overrides)
    check_known(config)
    hardware.check_fp8(config.train.precision)
    out = checked_out(config, wishes.out)
    was_there = out.exists()
    request = {"config": str(path), "overrides": list(overrides), "gpu": gpu, "world_size": world_size}
    request["out"] = str(out)
    answer = answer_of("launcher.estimate.child", request, "traces")
    if answer is None:
        if not was_there:
            shutil.rmtree(out, ignore_errors=True)
        return 1
    return publish(answer, out, as_json=wishes.as_json)


def load_for_job(path: Path, overrides: Sequence[str]) -> tuple[RunConfig, int]:
    """The config, and the number of processes of its Slurm job; where it does not fit them, the fewest of its layout.

    A config that says nothing about Slurm may be meant for one GPU.
    """
    try:
        config = load_checked(path, overrides, world_size=None, data=False)
        return config, config.slurm.world_size
    except UserError:
        n_ranks = fewest_ranks(path, overrides)
        return load_checked(path, overrides, world_size=n_ranks, data=False), n_ranks
