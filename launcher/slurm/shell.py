"""What sbatch is given of the shell that submits: what that shell says of other jobs must not change this one.

To sbatch a variable of its own (SBATCH_TIMELIMIT) counts for more than a line of the script. What Slurm has set in the
shell of a job (SLURM_GPUS_PER_TASK) is handed over to a job that is submitted from there, where srun reads it.
"""

import os
from collections.abc import Mapping

from launcher.slurm.config import SlurmConfig

# What every script says, or leaves out on purpose. With SBATCH_WAIT sbatch would wait for the job's end.
OURS = (
    *("JOB_NAME", "ARRAY_INX", "TIMELIMIT", "SIGNAL", "REQUEUE", "NO_REQUEUE", "OPEN_MODE", "OUTPUT", "ERROR", "WAIT"),
    *("GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK"),
)
# What a script says where the key is set; else the shell's counts, as with any job.
OF_KEYS = {
    "partition": ("PARTITION",),
    "account": ("ACCOUNT",),
    "qos": ("QOS",),
    "constraint": ("CONSTRAINT",),
    "exclude": ("EXCLUDE",),
    "memory": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "cpus_per_task": ("CPUS_PER_TASK", "CPUS_PER_GPU"),
}
OF_THE_CLUSTER = ("CONF", "CONF_SERVER", "CLUSTERS", "JWT", "TIME_FORMAT", "UMASK")  # these are no job's


def for_sbatch(slurm: SlurmConfig, shell: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that sbatch gets. Those that ``slurm.environment`` names are kept."""
    stated = [name for key, names in OF_KEYS.items() if getattr(slurm, key) is not None for name in names]
    dropped = {f"SBATCH_{name}" for name in (*OURS, *stated)}
    if "SLURM_JOB_ID" in shell:
        kept = {f"SLURM_{name}" for name in OF_THE_CLUSTER}
        dropped |= {name for name in shell if name.startswith("SLURM_")} - kept
    dropped -= set(slurm.passed_on)
    return {name: value for name, value in shell.items() if name not in dropped}


def default_partition(shell: Mapping[str, str] = os.environ) -> str | None:
    """The partition that the shell names for jobs whose script names none; None where it names none either."""
    return shell.get("SBATCH_PARTITION") or None
