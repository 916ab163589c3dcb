"""Selects the environment variables of the submitting shell that sbatch gets, so that none changes the job.

sbatch lets its own variables (SBATCH_TIMELIMIT) override the lines of the script. Variables that Slurm has set in the
shell of a job (SLURM_GPUS_PER_TASK) are inherited by a job that is submitted from there, where srun reads them.
"""

import os
from collections.abc import Mapping

from launcher.slurm.config import SlurmConfig

# Options that every script sets, or leaves out on purpose. With SBATCH_WAIT sbatch would wait for the job's end.
OURS = (
    *("JOB_NAME", "ARRAY_INX", "TIMELIMIT", "SIGNAL", "REQUEUE", "NO_REQUEUE", "OPEN_MODE", "OUTPUT", "ERROR", "WAIT"),
    *("GPUS", "GPUS_PER_NODE", "GPUS_PER_TASK"),
)
# Options that a script sets only where the config has the key; otherwise the shell's variable is passed on, as it is
# for options that `slurm.options` does not hold.
OF_KEYS = {
    "partition": ("PARTITION",),
    "account": ("ACCOUNT",),
    "qos": ("QOS",),
    "constraint": ("CONSTRAINT",),
    "exclude": ("EXCLUDE",),
    "memory": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"),
    "cpus_per_task": ("CPUS_PER_TASK", "CPUS_PER_GPU"),
}
OF_OPTIONS = {"switches": ("REQ_SWITCH", "WAIT4SWITCH")}  # otherwise they are called as the options are
OF_THE_CLUSTER = ("CONF", "CONF_SERVER", "CLUSTERS", "JWT", "TIME_FORMAT", "UMASK")  # of the cluster, not of a job


def for_sbatch(slurm: SlurmConfig, shell: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for sbatch: the shell's, without what would override the script or belongs to another job.

    Variables that ``slurm.environment`` names are always kept.
    """
    stated = [name for key, names in OF_KEYS.items() if getattr(slurm, key) is not None for name in names]
    options = [each.partition("=")[0] for each in slurm.options]
    stated += [name for each in options for name in OF_OPTIONS.get(each, (each.upper().replace("-", "_"),))]
    dropped = {f"SBATCH_{name}" for name in (*OURS, *stated)}
    if "SLURM_JOB_ID" in shell:
        kept = {f"SLURM_{name}" for name in OF_THE_CLUSTER}
        dropped |= {name for name in shell if name.startswith("SLURM_")} - kept
    dropped -= set(slurm.passed_on)
    return {name: value for name, value in shell.items() if name not in dropped}


def default_partition(shell: Mapping[str, str] = os.environ) -> str | None:
    """The partition that SBATCH_PARTITION names for scripts without one; None where it is not set."""
    return shell.get("SBATCH_PARTITION") or None
