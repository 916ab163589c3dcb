"""`roundtable preflight CONFIG`: measures the nodes that it runs on, and names those that a run should not use."""

import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.errors import reason_of
from data.places import why_no_path, why_not_writable
from launcher.config.load import load_config
from launcher.config.rules import check
from launcher.config.tree import RunConfig
from launcher.console import say, tell
from launcher.errors import UserError
from launcher.limits import check_local_ranks
from launcher.preflight.judge import Judgement, judge
from launcher.preflight.report import as_json, lines
from launcher.training.run_dir import check_writable
from launcher.training.start import default_ranks
from parallel.preflight.findings import Findings
from parallel.processes.environment import number
from parallel.processes.lifeline import end_with_job
from parallel.processes.world import rank_hosts, set_rank_environment, world_size_from_environment

READ = ("name", "run_dir", "train.start_seconds")  # the keys of the config that a preflight uses
FOLDER = "preflight"  # the run directory's folder for measurements


@dataclass(frozen=True)
class Outcome:
    """The measurements, the judgement on each node, and the seconds that they took."""

    found: Findings
    judgement: Judgement
    seconds: float


def preflight_config(
    path: Path, overrides: Sequence[str], ranks: int | None, bad_nodes: str | None, *, json_wanted: bool
) -> int:
    """Measures on ``ranks`` local processes, or as one rank of a torchrun or srun job; returns the exit code.

    0: no bad node; 1: rank 0 found bad nodes, or there is no verdict. Rank 0 prints the table, keeps all measurements
    in RUN_DIR/preflight/, and writes the names of the bad nodes into the file ``bad_nodes``, one a line, also where
    there are none. Without a verdict there is no such file: one of an earlier run is removed before anything is
    measured.
    """
    job_size = world_size_from_environment()
    if job_size is None:
        check_local_ranks(ranks)
        config = read_config(path, overrides)
        check_new_list(bad_nodes)
        remove_old_list(bad_nodes)
        outcome = measure_here(config, ranks or default_ranks())
    elif ranks is None or ranks == job_size:
        config, outcome = measure_job(path, overrides, bad_nodes)
    else:
        raise UserError(
            [f"--ranks={ranks} must equal the job's {job_size} processes; leave it out under srun or torchrun"]
        )
    return outcome if isinstance(outcome, int) else conclude(config, outcome, bad_nodes, json_wanted=json_wanted)


def measure_here(config: RunConfig, n_ranks: int) -> Outcome | int:
    """The outcome measured by ``n_ranks`` local processes, or exit code 1 where they fail."""
    from parallel.processes.start import RankError, run_ranks

    try:
        return run_ranks(measure, n_ranks, config)[0]
    except RankError as error:
        tell(error)
        return 1


def measure_job(path: Path, overrides: Sequence[str], bad_nodes: str | None) -> tuple[RunConfig, Outcome | int]:
    """The config, and this rank's result in the job's measurement: the outcome on rank 0, an exit code on others.

    Every rank of the job must call it. A rank that cannot read the config where others can has a broken node; a config
    that no rank can use is the user's mistake, and raises UserError.
    """
    from parallel.processes.roll_call import RollCallError

    end_with_job()
    config, problems = RunConfig(), []
    try:
        config = read_config(path, overrides)
    except UserError as error:
        problems = error.problems
    set_rank_environment()
    if os.environ["RANK"] == "0":
        remove_old_list(bad_nodes)
    try:
        return config, measure(config, rank_hosts(), problems) or 0
    except RollCallError as error:
        if error.is_disagreement:
            raise UserError(error.lines) from None
        tell(error)
        return config, 1


def read_config(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The config; only the keys that a preflight uses are checked, since it runs on any number of processes."""
    config = load_config(path, overrides)
    problems = [line for line in check(config, config.slurm.world_size) if line.partition("=")[0] in READ]
    if problems:
        raise UserError(problems)
    check_writable(config)
    return config


def check_new_list(path: str | None) -> None:
    """Raises UserError where the list of bad nodes cannot be written to ``path``; called before measuring."""
    if path is None:
        return
    rule = why_no_path(path) or ("must be a file, and is a folder" if os.path.isdir(path) else None)
    rule = rule or why_not_writable(Path(path).parent)
    if rule is not None:
        raise UserError([f"--bad-nodes={path} {rule}; choose another file"])


def remove_old_list(path: str | None) -> None:
    """Removes an earlier run's list of bad nodes, so that nobody takes it for this run's if there is no verdict.

    A list that cannot be removed cannot be written either, which ``conclude`` reports.
    """
    if path:
        with contextlib.suppress(OSError):
            Path(path).unlink()


def measure(config: RunConfig, hosts: Sequence[str] | None = None, problems: Sequence[str] = ()) -> Outcome | None:
    """One rank's part in the measurement, which all ranks must call; returns the outcome on rank 0, else None.

    ``hosts`` names each rank's node, where these are known in advance. ``problems`` say why this rank cannot take part,
    and are sent to the other ranks.
    """
    from parallel.preflight.course import run_course
    from parallel.processes.roll_call import RollCall

    started = time.monotonic()
    roll = RollCall(config.train.start_seconds, hosts)
    found = run_course(roll, config.run_path / FOLDER, problems, tell=tell)
    return None if found is None else Outcome(found, judge(found), time.monotonic() - started)


def conclude(config: RunConfig, outcome: Outcome, bad_nodes: str | None, *, json_wanted: bool) -> int:
    """Prints the outcome, stores it and the list of bad nodes, and returns 1 if there are any, else 0; for rank 0."""
    said = as_json(outcome.found, outcome.judgement, outcome.seconds)
    if json_wanted:
        say(json.dumps(said, indent=2))
    else:
        say("\n".join(lines(outcome.found, outcome.judgement, outcome.seconds)))
    folder = config.run_path / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name_of_this_one()}.json").write_text(json.dumps(said, indent=2) + "\n")
    bad = outcome.judgement.bad_nodes
    if bad_nodes is not None:
        try:
            Path(bad_nodes).write_text("".join(f"{node}\n" for node in bad))
        except OSError as error:
            told = f"--bad-nodes={bad_nodes} cannot be written ({reason_of(error)}); choose another file"
            raise UserError([told]) from None
    return 1 if bad else 0


def name_of_this_one() -> str:
    """The name of this outcome's file: the Slurm job, start and step, or the date and time outside of Slurm."""
    if "SLURM_JOB_ID" in os.environ:
        restart, step = number("SLURM_RESTART_COUNT", default=0), number("SLURM_STEP_ID", default=0)
        return f"job-{number('SLURM_JOB_ID')}-start-{restart}-step-{step}"
    return time.strftime("%Y%m%d-%H%M%S")
