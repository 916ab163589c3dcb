"""The job script: slurm/*.sbatch with a run's own settings."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from launcher.config.tree import RunConfig
from launcher.slurm.config import SlurmConfig

SETTINGS = re.compile(r"# --- settings\n.*# --- end of settings\n", re.DOTALL)
COMMENT = "roundtable:"  # begins every job's comment; the run directory follows


def render(template: str, config: RunConfig, config_path: Path, python: str) -> str:
    """The script that trains ``config``, which the job reads from ``config_path``; ``python`` where none is set."""
    lines = [*sbatch_lines(config), *shell_lines(config, config_path, python)]
    block = "\n".join(["# --- settings", *lines, "# --- end of settings", ""])
    text, n_found = SETTINGS.subn(lambda _: block, template)
    assert n_found == 1
    return text.replace(_notes_by_hand(template), "")


def _notes_by_hand(template: str) -> str:
    """The comment lines that tell how to submit the script by hand."""
    head = template.partition("# --- settings\n")[0]
    start = head.index("#\n# By hand")
    return head[start:]


def sbatch_lines(config: RunConfig) -> Iterator[str]:
    """What sbatch reads."""
    slurm = config.slurm
    options: dict[str, object] = {
        "job-name": config.name,
        "comment": comment(config.run_path),
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "nodes": slurm.nodes,
        "ntasks-per-node": slurm.n_tasks_per_node,
        "gpus-per-node": slurm.gpus_per_node or None,
        "cpus-per-task": slurm.cpus_per_task,
        "mem": slurm.memory,
        "time": time_limit(slurm.time_minutes),
        "signal": f"B:USR1@{slurm.notice_seconds}",
        "dependency": "singleton" if slurm.chain > 1 else None,
        "open-mode": "append",
        "output": f"{config.run_path}/logs/job-%j.log".replace("%", "%%").replace("%%j", "%j"),
    }
    for option, value in options.items():
        if value is not None:
            yield f"#SBATCH --{option}={quote_for_sbatch(str(value))}"
    yield "#SBATCH --requeue" if slurm.requeue else "#SBATCH --no-requeue"


def shell_lines(config: RunConfig, config_path: Path, python: str) -> Iterator[str]:
    """What the shell reads."""
    slurm = config.slurm
    if slurm.modules:
        yield f"module load {' '.join(slurm.modules)}"
    for name, value in exports(slurm):
        yield f"export {name}={shlex.quote(value)}"
    yield f"RUN_DIR={shlex.quote(str(config.run_path))}"
    yield f"PYTHON={shlex.quote(slurm.python or python)}"
    yield f"REQUEUE={'yes' if slurm.requeue else 'no'}"
    yield f"RESTARTS={slurm.restarts}"
    options = []
    if slurm.container is not None:
        options = [f"--container-image={shlex.quote(slurm.container)}", '--container-mounts="$PWD:$PWD"']
        options.append('--container-workdir="$PWD"')
    yield f"SRUN_OPTIONS=({' '.join(options)})"
    yield f"set -- {shlex.quote(str(config_path))}"


def exports(slurm: SlurmConfig) -> Iterator[tuple[str, str]]:
    """Environment variables of the job."""
    if slurm.network_interface is not None:
        yield "NCCL_SOCKET_IFNAME", slurm.network_interface
        if slurm.network_interface[0] not in "^=":  # gloo knows no exceptions
            yield "GLOO_SOCKET_IFNAME", slurm.network_interface
    if slurm.scratch is not None:
        yield "TRITON_CACHE_DIR", f"{slurm.scratch}/roundtable/triton"
        yield "TORCHINDUCTOR_CACHE_DIR", f"{slurm.scratch}/roundtable/inductor"
    for pair in slurm.environment:
        name, _, value = pair.partition("=")
        yield name, value


def comment(run_path: Path) -> str:
    """By which a job is known to train in ``run_path``."""
    return f"{COMMENT}{run_path.absolute()}"


def time_limit(minutes: int) -> str:
    """As Slurm writes it: days-hours:minutes:seconds."""
    days, left = divmod(minutes, 1440)
    return f"{days}-{left // 60:02}:{left % 60:02}:00"


def quote_for_sbatch(value: str) -> str:
    """``value`` as sbatch's own reader takes it."""
    return value if re.fullmatch(r"[\w.,:;&|=@^*+/()\[\]%-]+", value) else f'"{value}"'
