"""Reads from torchrun's or srun's environment whether this process is already one rank of a job, and which one."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from parallel.processes.environment import MOST_RANKS, WrongEnvironment, address, check_counts, number, show

PORTS = range(20000, 30000)  # of srun jobs: a port follows from the job's number; Linux's ephemeral ports are higher
LARGEST_PORT = 65535


def world_size_from_environment(environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of the job's processes under torchrun or srun; None in a plain shell, such as an sbatch script's own.

    Raises WrongEnvironment with every variable that is wrong or missing, so that nothing waits for ranks that will
    never start.
    """
    problems = check_counts(environment)
    size = None
    if "RANK" in environment or ("WORLD_SIZE" in environment and not in_step(environment)):
        size = _check_ranks(environment, ("WORLD_SIZE", "RANK", "LOCAL_RANK"), problems)
        _collect(problems, address, "MASTER_ADDR", environment)
        _collect(problems, number, "MASTER_PORT", environment, least=1, most=LARGEST_PORT)
    elif in_step(environment):
        size = _check_ranks(environment, ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"), problems)
        _collect(problems, _step_address, environment)
        _collect(problems, _step_port, environment)
    if problems:
        raise WrongEnvironment(list(dict.fromkeys(problems)))
    return size


def in_step(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is in an srun step. If RANK is set too, torchrun started it there, and RANK counts first."""
    return "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment


def _check_ranks(environment: Mapping[str, str], names: tuple[str, str, str], problems: list[str]) -> int | None:
    """The number of ranks, or None where its variable is wrong; adds to ``problems`` a line for each wrong variable.

    ``names``: the variables with the number of ranks, this rank, and this rank's number on its node.
    """
    size_name, *rank_names = names
    size = _collect(problems, number, size_name, environment, least=1, most=MOST_RANKS)
    for name in rank_names:
        why = f" (below {size_name}={size})" if size else ""
        _collect(problems, number, name, environment, most=(size or MOST_RANKS) - 1, why=why)
    return size


def _collect(problems: list[str], read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What ``read`` returns; None, with its problems added to ``problems``, where it raises WrongEnvironment."""
    try:
        return read(*arguments, **options)
    except WrongEnvironment as error:
        problems += error.problems


def set_rank_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Under srun, sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from Slurm's variables.

    The address is that of the step's first host (from `scontrol show hostnames`), unless MASTER_ADDR is set. Does
    nothing under torchrun.
    """
    if "RANK" in environment:
        return
    environment["MASTER_ADDR"] = _step_address(environment)
    environment["MASTER_PORT"] = str(_step_port(environment))
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]


def _step_address(environment: Mapping[str, str]) -> str:
    """The host on which rank 0 of an srun step listens: MASTER_ADDR, or the first of the step's hosts."""
    if "MASTER_ADDR" in environment:
        return address("MASTER_ADDR", environment)
    nodes = environment.get("SLURM_STEP_NODELIST")
    if not nodes:
        raise WrongEnvironment(["SLURM_STEP_NODELIST must name the step's nodes; start by srun, or set MASTER_ADDR"])
    return expand_hosts(nodes)[0]


def _step_port(environment: Mapping[str, str]) -> int:
    """The port on which rank 0 listens: MASTER_PORT, or one that follows from the numbers of job and step."""
    if "MASTER_PORT" in environment:
        return number("MASTER_PORT", environment, least=1, most=LARGEST_PORT)
    job, step = number("SLURM_JOB_ID", environment, least=1), number("SLURM_STEP_ID", environment, default=0)
    return PORTS[(job * 31 + step) % len(PORTS)]


def expand_hosts(node_list: str) -> list[str]:
    """The hosts of a Slurm node list, such as n1, n2, n3 for n[1-3], as `scontrol show hostnames` prints them.

    Raises WrongEnvironment where scontrol is needed and is missing or fails.
    """
    if re.fullmatch(r"[A-Za-z0-9._-]+", node_list):  # one host needs no scontrol
        return [node_list]
    remedy = "put Slurm's commands on PATH (into the container too), or set MASTER_ADDR to the first node's address"
    found = f"SLURM_STEP_NODELIST={show(node_list)} must be a list of hosts that scontrol expands"
    command = ["scontrol", "show", "hostnames", node_list]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        raise WrongEnvironment([f"{found}, and there is no scontrol here; {remedy}"]) from None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise WrongEnvironment([f"{found}, and scontrol failed ({type(error).__name__}); {remedy}"]) from None
    if done.returncode or not done.stdout.split():
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise WrongEnvironment([f"{found}, and scontrol said: {said}; {remedy}"])
    return done.stdout.split()


def rank_hosts(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The node of each rank, by rank, of an srun job with block distribution; None where that is not known.

    Roundtable's job scripts set ROUNDTABLE_NODES to the step's nodes, since a container may have no `scontrol`. Under
    torchrun the nodes are not known.
    """
    if "SLURM_STEP_TASKS_PER_NODE" not in environment:
        return None
    if "ROUNDTABLE_NODES" in environment:
        hosts = environment["ROUNDTABLE_NODES"].split(",")
    elif shutil.which("scontrol") is not None:
        hosts = expand_hosts(environment["SLURM_STEP_NODELIST"])
    else:
        return None
    counts = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
    if len(hosts) != len(counts) or sum(counts) != number("WORLD_SIZE", environment):
        return None
    return [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]


def ranks_on_node(job_size: int, environment: Mapping[str, str] = os.environ) -> int:
    """The most ranks that a node of the job has, under torchrun or srun; ``job_size`` where that is not known."""
    if "RANK" in environment:
        return number("LOCAL_WORLD_SIZE", environment, least=1, default=job_size)
    return max(expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "")), default=job_size)


def expand_counts(text: str) -> list[int]:
    """The number of tasks on each node, from Slurm's short form: 2(x3),1 gives 2, 2, 2, 1."""
    parts = (re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part) for part in text.split(","))
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def array_task(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """This task's position in a Slurm job array, from 0, and the number of tasks there; None outside an array.

    Raises WrongEnvironment where Slurm's variables are missing or wrong.
    """
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return None
    count = number("SLURM_ARRAY_TASK_COUNT", environment, least=1)
    step = number("SLURM_ARRAY_TASK_STEP", environment, least=1, default=1)
    first = number("SLURM_ARRAY_TASK_MIN", environment)
    last = first + (count - 1) * step
    why = f" (SLURM_ARRAY_TASK_COUNT={count} tasks from SLURM_ARRAY_TASK_MIN={first}, {step} apart)"
    task = number("SLURM_ARRAY_TASK_ID", environment, least=first, most=last, why=why)
    return (task - first) // step, count
