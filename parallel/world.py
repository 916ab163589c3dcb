"""Whether this process is already one rank of a job, and which: torchrun's or srun's environment."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping

PORTS = range(20000, 30000)  # for srun jobs: the port follows from the job's number, below Linux's ephemeral ones


def world_size_from_environment(environment: Mapping[str, str] = os.environ) -> int | None:
    """The job's processes under torchrun or srun; None in a plain shell (an sbatch script's own included)."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return int(environment["WORLD_SIZE"])
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return int(environment["SLURM_STEP_NUM_TASKS"])
    return None


def set_rank_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Under srun, sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from Slurm's variables.

    The address is the step's first host, as `scontrol show hostnames` expands it. Does nothing under torchrun.
    """
    if "RANK" in environment:
        return
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = expand_hosts(environment["SLURM_STEP_NODELIST"])[0]
    if "MASTER_PORT" not in environment:
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
        environment["MASTER_PORT"] = str(PORTS[(job * 31 + step) % len(PORTS)])


def expand_hosts(node_list: str) -> list[str]:
    """n[1-3] as n1, n2, n3: what `scontrol show hostnames` prints."""
    command = ["scontrol", "show", "hostnames", node_list]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()


def rank_hosts(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """The node of each rank of an srun job with block distribution; None where that is not known.

    The job scripts give the step's nodes in ROUNDTABLE_NODES, for a container may have no `scontrol`. Unknown under
    torchrun.
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
    if len(hosts) != len(counts) or sum(counts) != int(environment["WORLD_SIZE"]):
        return None
    return [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]


def expand_counts(text: str) -> list[int]:
    """Slurm's short form of tasks on each node: 2(x3),1 is 2, 2, 2, 1."""
    parts = (re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(","))
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]


def array_task(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """This task's place in a Slurm array, from 0, and the number of tasks; None outside an array."""
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return None
    task, first = int(environment["SLURM_ARRAY_TASK_ID"]), int(environment["SLURM_ARRAY_TASK_MIN"])
    step = int(environment.get("SLURM_ARRAY_TASK_STEP", "1"))
    return (task - first) // step, int(environment["SLURM_ARRAY_TASK_COUNT"])
