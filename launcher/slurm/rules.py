"""Rules for the `slurm:` section that hold on any cluster."""

import difflib
import re
from collections.abc import Iterator

from launcher.config.words import show
from launcher.slurm.config import SlurmConfig

WORDS = ("partition", "account", "qos", "constraint", "exclude", "memory", "network_interface")
PATHS = ("python", "container", "scratch")
WORD = re.compile(r"(?!-)[\w.,:;&|=@^*+/()\[\]-]+", re.ASCII)
MODULE = re.compile(r"\w[\w.+/:-]*", re.ASCII)
OPTION = re.compile(rf"([a-z][a-z-]*)(=({WORD.pattern}))?", re.ASCII)
MOUNT = re.compile(r"/[^:,\"\\]*(:/[^:,\"\\]*(:[\w+-]+)?)?", re.ASCII)
# The options of sbatch that say where and when a job runs. The others are set by keys and the job script, or would
# change what the script does.
FURTHER_OPTIONS = (
    *("acctg-freq", "begin", "contiguous", "core-spec", "cores-per-socket", "cpu-freq", "deadline", "delay-boot"),
    *("exclusive", "gpu-freq", "gres", "gres-flags", "hint", "licenses", "mail-type", "mail-user", "mcs-label"),
    *("network", "nice", "power", "prefer", "priority", "profile", "reboot", "reservation", "sockets-per-node"),
    *("spread-job", "switches", "thread-spec", "threads-per-core", "tmp", "use-min-nodes", "wait-all-nodes", "wckey"),
)
VARIABLE = re.compile(r"([A-Za-z_]\w*)(=.*)?", re.ASCII)
TAKEN = re.compile(  # variables that Slurm, bash or the job script sets and relies on
    r"SLURM_(JOB_?ID|JOB_NAME|JOB_NODELIST|PROCID|NTASKS_PER_NODE|RESTART_COUNT|(ARRAY|STEP)_\w+)|ROUNDTABLE_\w+"
    r"|IFS|E?UID|PPID|BASH\w*|SHELLOPTS|PWD|OLDPWD|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT"
    r"|JOB|RUN_DIR|SWEEP|PYTHON|REQUEUE|RESTARTS|PREFLIGHT|SPARES|SRUN_OPTIONS"
)


def check_slurm(slurm: SlurmConfig) -> Iterator[str]:
    """One line for each rule that is broken: key, value, rule, remedy."""
    for name in WORDS:
        value = getattr(slurm, name)
        if value is not None and not WORD.fullmatch(value):
            yield f"slurm.{name}={show(value)} must be one word, as Slurm knows it; try null, or look it up with sinfo"
    for name in PATHS:
        value = getattr(slurm, name)
        if value is not None and (not value.strip() or not value.isprintable() or value.startswith("-")):
            yield f"slurm.{name}={show(value)} must be a path or a name; try null"
    for number, value in enumerate(slurm.modules):
        if not MODULE.fullmatch(value):
            yield f"slurm.modules[{number}]={show(value)} must be a module's name; try one that `module avail` lists"
    for number, value in enumerate(slurm.environment):
        match = VARIABLE.fullmatch(value) if value.isprintable() else None
        if match is None:
            yield f"slurm.environment[{number}]={show(value)} must be NAME=value, or NAME; try NCCL_DEBUG=INFO"
        elif TAKEN.fullmatch(match[1]):
            yield (
                f"slurm.environment[{number}]={show(value)} must not set {match[1]}, which Slurm, bash or the job "
                "script sets; choose another name, or leave it out"
            )
    yield from _check_options(slurm)
    yield from _check_mounts(slurm)
    if slurm.spare_nodes and not slurm.preflight:
        yield (
            f"slurm.spare_nodes={slurm.spare_nodes} needs slurm.preflight=true, which says whose place they take; try "
            "slurm.spare_nodes=0"
        )
    if slurm.notice_seconds >= 60 * slurm.time_minutes >= 60:
        yield (
            f"slurm.time_minutes={slurm.time_minutes} must be longer than slurm.notice_seconds={slurm.notice_seconds}, "
            f"the time to save at its end; try {slurm.notice_seconds // 60 + 60}"
        )


def _check_options(slurm: SlurmConfig) -> Iterator[str]:
    seen: set[str] = set()
    for number, value in enumerate(slurm.options):
        key, match = f"slurm.options[{number}]={show(value)}", OPTION.fullmatch(value)
        if match is None:
            yield f"{key} must be NAME, or NAME=value of one word, as sbatch knows it; try reservation=week"
        elif match[1] not in FURTHER_OPTIONS:
            near = difflib.get_close_matches(match[1], FURTHER_OPTIONS, n=1)
            remedy = f"did you mean {near[0]}?" if near else "leave it out"
            yield f"{key} must be one of sbatch's options {', '.join(FURTHER_OPTIONS)}; {remedy}"
        elif match[1] in seen:
            yield f"{key} must not give {match[1]} a second time; leave it out"
        else:
            seen.add(match[1])


def _check_mounts(slurm: SlurmConfig) -> Iterator[str]:
    for number, value in enumerate(slurm.container_mounts):
        key = f"slurm.container_mounts[{number}]={show(value)}"
        if not MOUNT.fullmatch(value) or not value.isprintable():
            yield f"{key} must be PATH, FROM:TO or FROM:TO:ro, of absolute paths; try /scratch:/scratch"
        elif slurm.container is None:
            yield f"{key} needs slurm.container, which would see it; try slurm.container_mounts=[]"
