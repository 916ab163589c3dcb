"""`roundtable submit`: checks everything that can be checked before, then submits the run to Slurm."""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.config.checked import load_checked
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from launcher.console import say, tell
from launcher.errors import UserError
from launcher.slurm.checks import check_hashes, check_job, check_names, node_notes, notes, processor_notes
from launcher.slurm.fit import check_fit, fit_notes
from launcher.slurm.profile import job_script, read_profile
from launcher.slurm.queue import SlurmError, ask
from launcher.slurm.script import FOLDER, render
from launcher.slurm.shell import for_sbatch
from launcher.training.run_dir import enter_start_folder


def submit_run(
    path: Path, overrides: Sequence[str], cluster: str, *, dry_run: bool, hashes: bool, plan: bool = True
) -> int:
    """Submits the run, or with ``dry_run`` prints its script; returns the exit code.

    Raises UserError, with nothing created or submitted, where the config is wrong, or, without ``dry_run``, where the
    job could not run. ``hashes``: read all token files and compare them with what was prepared. ``plan``: refuse a
    run that will not fit the GPUs' memory.
    """
    profile = {"slurm": read_profile(cluster)}
    path = enter_start_folder(path, overrides)
    config = load_checked(path, overrides, base=profile, world_size=None, data=False)
    if unfit := check_names(config):
        raise UserError(unfit)
    script = render(job_script("train"), config, sys.executable)
    problems = check_job(config, script) + (check_fit(config) if plan else [])
    if dry_run:
        say(script, end="")
        for problem in problems:
            tell(f"warning: {problem}")
        return 0
    if hashes and not problems:
        problems = check_hashes(config)
    if problems:
        raise UserError(problems)
    of_cluster = (*node_notes(config), *processor_notes(config, script))
    for note in (*notes(config), *of_cluster, *(fit_notes(config) if plan else ())):
        tell(note)
    write_config(config)
    print_how_to_follow(config, hand_over_chain(config, script))
    return 0


def write_config(config: RunConfig) -> None:
    """Writes the resolved config to RUN_DIR/slurm/config.yaml, where the job reads it, and creates RUN_DIR/logs."""
    for folder in (FOLDER, "logs"):
        (config.run_path / folder).mkdir(parents=True, exist_ok=True)
    (config.run_path / FOLDER / "config.yaml").write_text(dump_config(config))


def hand_over_chain(config: RunConfig, script: str) -> list[str]:
    """Submits the script ``slurm.chain`` times; returns the jobs' ids.

    Sites limit a user's jobs: where Slurm accepts only some of them, these are cancelled and UserError is raised.
    """
    job_ids = [hand_over(config, script)]
    for _ in range(1, config.slurm.chain):
        try:
            job_ids.append(submitted(config))
        except SlurmError as error:
            taken = f"sbatch takes {len(job_ids)} of these jobs: {error}"
            remedy = f"{cancelled(job_ids)}try slurm.chain={len(job_ids)}"
            raise UserError([f"slurm.chain={config.slurm.chain}: {taken}; {remedy}"]) from None
    return job_ids


def cancelled(job_ids: Sequence[str]) -> str:
    """Cancels jobs; returns "" or, where that fails, words that tell the user how to cancel them, for a remedy."""
    try:
        ask("scancel", *job_ids)
    except (SlurmError, OSError):
        return f"`scancel {' '.join(job_ids)}` ends those, then "
    return ""


def hand_over(config: RunConfig, script: str) -> str:
    """Writes the script into the directory of the run or the sweep and submits it; returns the job's id.

    Raises UserError where sbatch refuses it.
    """
    path = script_path(config)
    path.write_text(script)
    try:
        return submitted(config)
    except SlurmError as error:
        raise UserError([f"sbatch does not take {path}: {error}; mend that, and submit again"]) from None


def script_path(config: RunConfig) -> Path:
    """The path that the job's script is written to."""
    return config.run_path / FOLDER / "train.sbatch"


def submitted(config: RunConfig) -> str:
    """Submits the script at ``script_path``; returns the job's id. Raises SlurmError where sbatch refuses it.

    A site's own sbatch may print more: the id, and a cluster's name after a semicolon, is the last line that is one.
    """
    given = ("--parsable", str(script_path(config)))
    said = ask("sbatch", *given, environment=for_sbatch(config.slurm))
    ids = re.findall(r"^(\d+)(?:;\S*)?$", said, re.MULTILINE)
    return ids[-1] if ids else said.strip()


def print_how_to_follow(config: RunConfig, job_ids: Sequence[str]) -> None:
    """Prints the jobs' ids, and the commands that follow and cancel them."""
    slurm, run = config.slurm, shlex.quote(str(config.run_path))
    nodes = f"{slurm.nodes} node{'s' if slurm.nodes > 1 else ''}"
    spares = f" (and {slurm.spare_nodes} spare)" if slurm.spare_nodes else ""
    each = f"{slurm.n_tasks_per_node} process{'es' if slurm.n_tasks_per_node > 1 else ''} on each"
    say(f"job {', '.join(job_ids)}: trains {run} on {nodes}{spares}, {each}")
    say(f"  roundtable status {run}")
    say(f"  roundtable logs {run} -f")
    say(f"  roundtable cancel {run} --save")
