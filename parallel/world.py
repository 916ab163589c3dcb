"""Whether this process is already one rank of a job, and which: torchrun's or srun's environment."""

import os
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
        command = ["scontrol", "show", "hostnames", environment["SLURM_STEP_NODELIST"]]
        hosts = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()
        environment["MASTER_ADDR"] = hosts[0]
    if "MASTER_PORT" not in environment:
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
        environment["MASTER_PORT"] = str(PORTS[(job * 31 + step) % len(PORTS)])
