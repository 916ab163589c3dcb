"""Renders the job script: a template of slurm/*.sbatch with the settings of a run or a sweep."""

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.places import nearest_existing
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.slurm.config import SlurmConfig
from parallel.checkpoint.places import is_remote, local_path

BEGIN, END = "# --- settings", "# --- end of settings"  # the lines that mark a template's settings
SETTINGS = re.compile(rf"^{BEGIN}\n.*?^{END}\n", re.DOTALL | re.MULTILINE)
COMMENT = "roundtable:"  # begins every job's comment; the run directory follows, or a sweep's
FOLDER = "slurm"  # in a run directory: the config and the script that were submitted
RUNS = f"{FOLDER}/runs.txt"  # in a sweep's directory: line n + 1 is the folder, below it, of the run that task n trains


@dataclass(frozen=True)
class Array:
    """A job array: its tasks, and how many may run at the same time (None: as many as Slurm has nodes for)."""

    n_tasks: int
    at_once: int | None

    def __str__(self) -> str:
        return f"0-{self.n_tasks - 1}" + (f"%{self.at_once}" if self.at_once is not None else "")


def render(template: str, config: RunConfig, python: str, array: Array | None = None) -> str:
    """The job script that trains ``config``, or with ``array`` the sweep's runs below its run directory.

    ``python`` is the interpreter where ``slurm.python`` is not set. The job reads the config of its run from
    RUN_DIR/slurm/config.yaml. Raises UserError where ``template`` does not have exactly one block of settings between
    the lines BEGIN and END.
    """
    lines = [*sbatch_lines(config, array), *shell_lines(config, python, array)]
    block = "\n".join([BEGIN, *lines, END, ""])
    text, n_found = SETTINGS.subn(lambda _: block, template)
    if n_found != 1:
        rule = f"must have its settings once, between '{BEGIN}' and '{END}', and has them {n_found} times"
        raise UserError([f"slurm/train.sbatch {rule}; put these two lines back"])
    return text.replace(_notes_by_hand(template), "")


def _notes_by_hand(template: str) -> str:
    """The comment lines that tell how to submit the script by hand, down to the settings; none where it has none."""
    head = template.partition(f"{BEGIN}\n")[0]
    _, found, notes = head.partition("#\n# By hand")
    return found + notes


def sbatch_lines(config: RunConfig, array: Array | None = None) -> Iterator[str]:
    """The #SBATCH lines of the script."""
    slurm, log = config.slurm, "%j" if array is None else "%A_%a"
    options: dict[str, object] = {
        "job-name": config.name,
        "comment": comment(config.run_path),
        "array": array,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "nodes": slurm.nodes + slurm.spare_nodes,
        "ntasks-per-node": slurm.n_tasks_per_node,
        "gpus-per-node": slurm.gpus_per_node or None,
        "cpus-per-task": slurm.cpus_per_task,
        "mem": slurm.memory,
        "time": time_limit(slurm.time_minutes),
        "signal": f"B:USR1@{slurm.notice_seconds}",
        "dependency": "singleton" if slurm.chain > 1 else None,
        "open-mode": "append",
        "output": f"{config.run_path}".replace("%", "%%") + f"/logs/job-{log}.log",
        **{name: value for name, _, value in (each.partition("=") for each in slurm.options)},
    }
    for option, value in options.items():
        if value is not None:
            given = f"={quote_for_sbatch(str(value))}" if value != "" else ""
            yield f"#SBATCH --{option}{given}"
    yield "#SBATCH --requeue" if slurm.requeue else "#SBATCH --no-requeue"


def shell_lines(config: RunConfig, python: str, array: Array | None = None) -> Iterator[str]:
    """The lines of the settings that bash executes: modules, environment, and the script's variables."""
    slurm = config.slurm
    if slurm.modules:
        yield "declare -F module >/dev/null || . /etc/profile  # a shell other than bash hands no `module` on"
        failed = "{ echo 'module load failed; the lines above say why' >&2; exit 1; }"
        yield f"module load {' '.join(map(shlex.quote, slurm.modules))} || {failed}"
    for name, value in exports(slurm):
        yield f"export {name}={value}"
    for name in slurm.passed_on:
        yield f': "${{{name}:?is not set in the job; submit from a shell that exports it}}"'
    if array is None:
        yield "JOB=$SLURM_JOB_ID"
        yield f"RUN_DIR={shlex.quote(str(config.run_path))}"
    else:  # the last task's SLURM_JOB_ID is the number of the whole array
        yield "JOB=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
        yield f"SWEEP={shlex.quote(str(config.run_path))}"
        yield f'RUN_DIR=$SWEEP/$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$SWEEP/{RUNS}")'
    yield f"PYTHON={shlex.quote(slurm.python or python)}"
    yield f"REQUEUE={'yes' if slurm.requeue else 'no'}"
    yield f"RESTARTS={slurm.restarts}"
    yield f"PREFLIGHT={'yes' if slurm.preflight else 'no'}"
    yield f"SPARES={slurm.spare_nodes}"
    options = []
    if slurm.container is not None:
        named = [each if ":" in each else f"{each}:{each}" for each in slurm.container_mounts]
        elsewhere = [f"{path}:{path}" for path in places_elsewhere(config)]
        mounts = ",".join(['"$PWD:$PWD"', *(shlex.quote(each) for each in [*elsewhere, *named])])
        options = [f"--container-image={shlex.quote(slurm.container)}", f"--container-mounts={mounts}"]
        options.append('--container-workdir="$PWD"')
    yield f"SRUN_OPTIONS=({' '.join(options)})"
    yield f'set -- "$RUN_DIR/{FOLDER}/config.yaml"'


def places_elsewhere(config: RunConfig) -> list[Path]:
    """The folders outside the current one that a container must show: of the run, its checkpoints and token files.

    Of one that is not there yet, it is the folder in which it will be made.
    """
    found: list[Path] = []
    for place in (config.run_path, config.checkpoint_location, config.data.token_dir):
        if is_remote(place):
            continue
        path = Path(nearest_existing(os.path.abspath(local_path(place))))
        if path != Path("/") and not any(path.is_relative_to(each) for each in (Path.cwd(), *found)):
            found.append(path)
    return found


def exports(slurm: SlurmConfig) -> Iterator[tuple[str, str]]:
    """Names and values of the job's environment variables, the values quoted for bash."""
    if slurm.network_interface is not None:
        yield "NCCL_SOCKET_IFNAME", shlex.quote(slurm.network_interface)
        if slurm.network_interface[0] not in "^=":  # gloo knows no exceptions
            yield "GLOO_SOCKET_IFNAME", shlex.quote(slurm.network_interface)
    if slurm.scratch is not None:
        yield "TRITON_CACHE_DIR", quote_except_variables(f"{slurm.scratch}/roundtable/triton")
        yield "TORCHINDUCTOR_CACHE_DIR", quote_except_variables(f"{slurm.scratch}/roundtable/inductor")
    for pair in slurm.environment:
        name, equals, value = pair.partition("=")
        if equals:
            yield name, shlex.quote(value)


def quote_except_variables(text: str) -> str:
    """``text`` quoted for bash, except that $NAME and ${NAME} are expanded; an unset variable ends the job."""
    parts = re.split(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", text, flags=re.ASCII)
    plain, names = parts[::3], [first or second for first, second in zip(parts[1::3], parts[2::3], strict=True)]
    filled = [f'"${{{name}:?is not set on the node}}"' for name in names] + [""]
    return "".join((shlex.quote(part) if part else "") + value for part, value in zip(plain, filled, strict=True))


def comment(run_path: Path) -> str:
    """The Slurm comment by which a job is known to train in ``run_path``."""
    return f"{COMMENT}{run_path.absolute()}"


def time_limit(minutes: int) -> str:
    """The time limit as Slurm writes it: days-hours:minutes:seconds."""
    days, left = divmod(minutes, 1440)
    return f"{days}-{left // 60:02}:{left % 60:02}:00"


def quote_for_sbatch(value: str) -> str:
    """``value`` as sbatch parses it in a #SBATCH line: as it is, or in double quotes.

    Raises ValueError for a value with quotes, backslashes or characters that cannot be printed.
    """
    if re.fullmatch(r"[\w.,:;&|=@^*+/()\[\]%-]+", value):
        return value
    if not value.isprintable() or set(value) & set('"\\'):  # the rules let no such value pass
        raise ValueError(f"{value!r} cannot be written into a job script")
    return f'"{value}"'
