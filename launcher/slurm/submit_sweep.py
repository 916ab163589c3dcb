"""`roundtable submit CONFIG --sweep FILE`: several runs as the tasks of one job array."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.config.words import show
from launcher.console import say, tell
from launcher.errors import UserError
from launcher.slurm.checks import (
    check_cluster,
    check_hashes,
    check_here,
    check_names,
    checkpoint_notes,
    node_notes,
    processor_notes,
    wandb_notes,
)
from launcher.slurm.fit import check_fit
from launcher.slurm.profile import job_script, read_profile
from launcher.slurm.script import FOLDER, RUNS, Array, render
from launcher.slurm.submit import hand_over, write_config
from launcher.slurm.sweep import Sweep, in_runs, load_sweep
from launcher.training.run_parts import CONFIG, LOGS, SLURM, check_parts
from launcher.training.start import room_free_gib, room_needed
from parallel.checkpoint.places import is_remote


def submit_sweep(
    file: Path, path: Path, overrides: Sequence[str], cluster: str, *, dry_run: bool, hashes: bool, plan: bool = True
) -> int:
    """Submits the runs of the sweep ``file``, or with ``dry_run`` prints script and runs; returns the exit code.

    Raises UserError, with nothing created or submitted, where a config is wrong, or, without ``dry_run``, where a run
    could not run. ``hashes``: read all token files and compare them with what was prepared. ``plan``: refuse runs that
    will not fit the GPUs' memory.
    """
    sweep = load_sweep(file, path, overrides, read_profile(cluster))
    if unfit := check_names(sweep.base):
        raise UserError(unfit)
    script = render(job_script("train"), sweep.base, sys.executable, Array(len(sweep.runs), sweep.at_once))
    problems = check_sweep(sweep, script)
    if plan:
        problems += in_runs({name: check_fit(config) for name, config in sweep.runs.items()}, len(sweep.runs))
    if dry_run:
        say(script, end="")
        for line in list_runs(sweep):
            say(f"# {line}")
        for problem in problems:
            tell(f"warning: {problem}")
        return 0
    if hashes and not problems:
        read = {(config.data, config.model.vocab_size): config for config in sweep.runs.values()}
        problems = [problem for config in read.values() for problem in check_hashes(config)]
    if problems:
        raise UserError(problems)
    found = in_runs({name: list(checkpoint_notes(config)) for name, config in sweep.runs.items()}, len(sweep.runs))
    wandb = wandb_notes(sweep.base, f"{shlex.quote(str(sweep.base.run_path))}/*")
    for note in (*wandb, *node_notes(sweep.base), *processor_notes(sweep.base, script), *found):
        tell(note)
    print_how_to_follow(sweep, submit(sweep, script))
    return 0


def check_sweep(sweep: Sweep, script: str) -> list[str]:
    """Every reason not to submit the sweep, one line each, with the run's name where it concerns one run.

    Changes nothing. Raises UserError where the sweep's directory is damaged.
    """
    base = sweep.base
    check_parts(base.run_path, SLURM, LOGS, writing=True)
    problems = in_runs({name: check_here(config) for name, config in sweep.runs.items()}, len(sweep.runs))
    if any((base.run_path / name).exists() for name in (CONFIG, f"{FOLDER}/{CONFIG}")):
        problems.append(
            f"run_dir={base.run_path} must not be a run's, since the sweep's runs lie in it; "
            "choose another name or run_dir"
        )
    problems += [] if problems else check_room_of_all(sweep)
    run_paths = [config.run_path for config in sweep.runs.values()]
    return problems + check_cluster(base, script, run_paths, is_right=not problems)


def check_room_of_all(sweep: Sweep) -> list[str]:
    """A line where the disk lacks room for the checkpoints of all runs together; that of each was checked before."""
    local = [config for config in sweep.runs.values() if not is_remote(config.checkpoint_location)]
    needed_gib = sum(room_needed(config)[1] for config in local if config.checkpoint.dir is None)
    free_gib = room_free_gib(sweep.base.run_path)
    if needed_gib <= free_gib:
        return []
    return [
        f"run_dir={sweep.base.run_path} must have room for the checkpoints of {len(local)} runs, {needed_gib:.3g} GiB, "
        f"and has {free_gib:.3g} GiB free; lower checkpoint.keep_last, or choose a run_dir on another disk"
    ]


def list_runs(sweep: Sweep) -> list[str]:
    """A line for each task: its run directory and its own overrides."""
    lines = []
    for task, (name, config) in enumerate(sweep.runs.items()):
        own = " ".join(f"{key}={show(value)}" for key, value in sweep.overrides[name].items())
        lines.append(f"task {task}: {config.run_path}  {own}".rstrip())
    return lines


def submit(sweep: Sweep, script: str) -> str:
    """Writes each run's config and the list of run directories, and submits the array; returns its job id.

    Task n trains the run of line n + 1 of the list. Slurm writes all tasks' logs into one folder; each run's own logs
    folder gets a link to its task's log.
    """
    folder = sweep.base.run_path
    for config in sweep.runs.values():
        write_config(config)
    for below in (FOLDER, "logs"):
        (folder / below).mkdir(exist_ok=True)
    (folder / RUNS).write_text("".join(f"{name}\n" for name in sweep.runs))
    job_id = hand_over(sweep.base, script)
    for task, config in enumerate(sweep.runs.values()):
        logs, name = config.run_path / "logs", f"job-{job_id}_{task}.log"
        (logs / name).unlink(missing_ok=True)
        (logs / name).symlink_to(os.path.relpath(folder / "logs" / name, logs))
    return job_id


def print_how_to_follow(sweep: Sweep, job_id: str) -> None:
    """Prints the array's id, its runs, and the commands that follow and cancel them."""
    slurm, folder, paths = sweep.base.slurm, sweep.base.run_path, [config.run_path for config in sweep.runs.values()]
    size = f"{len(paths)} runs of {slurm.nodes} nodes x {slurm.n_tasks_per_node} processes"
    say(f"job {job_id}: {size} train in {shlex.quote(str(folder))}")
    for line in list_runs(sweep):
        say(f"  {line}")
    say(f"  roundtable status {shlex.quote(str(folder))}")
    say(f"  roundtable logs {shlex.quote(str(paths[0]))} -f")
    say(f"  roundtable cancel {shlex.quote(str(folder))} --save")
