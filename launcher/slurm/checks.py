"""Checks made before a job is submitted, so that it does not fail after hours in the queue."""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from data.errors import DataError
from data.places import nearest_existing
from launcher.config.tree import RunConfig
from launcher.config.words import join_or, show
from launcher.errors import UserError
from launcher.slurm.config import SlurmConfig
from launcher.slurm.queue import (
    Partition,
    SlurmError,
    live_jobs,
    nodes_up,
    partitions,
    processors_of,
    require,
    would_take,
)
from launcher.slurm.resumption import look_for_checkpoint
from launcher.slurm.script import RUNS
from launcher.slurm.shell import default_partition
from launcher.training.init_from import with_source
from launcher.training.newest import check_checkpoints
from launcher.training.owner import check_owner
from launcher.training.run_dir import check_newest_checkpoint, check_resume, check_writable, saved_config
from launcher.training.run_parts import check_parts
from launcher.training.start import (
    check_checkpoint_dir,
    check_evaluated_tasks,
    check_room,
    check_tokens,
    checkpoint_gib,
)

NODE_LOCAL = ("tmpfs", "ramfs", "devtmpfs")  # file systems that no other node can see
FEWEST_PROCESSORS = 4  # a process with a GPU has threads that launch kernels, run backward passes, load and save data
SAVE_GIB_PER_SECOND = 0.25  # the least that one node is assumed to write; only for estimating the time of a save


def check_job(config: RunConfig, script: str) -> list[str]:
    """Every reason not to submit, one line each. Changes nothing."""
    problems = check_here(config)
    return problems + check_cluster(config, script, [config.run_path], is_right=not problems)


def check_here(config: RunConfig) -> list[str]:
    """Every problem of one run that can be found without Slurm: container, environment, run directory, data, W&B."""
    job = [*check_container(config.slurm), *check_environment(config)]
    return [*job, *check_run(config), *check_data(config), *check_wandb(config)]


def check_cluster(config: RunConfig, script: str, run_paths: Sequence[Path], *, is_right: bool) -> list[str]:
    """Every problem that Slurm's commands reveal of the job that trains in ``run_paths``.

    The script is tried with ``sbatch --test-only`` where no other check found a problem (``is_right``: nor did those
    made before this call).
    """
    try:
        require("sbatch", "squeue", "sinfo")
        problems = [*check_partition(config), *check_unused(config, run_paths)]
        refusal = would_take(script, config.slurm) if is_right and not problems else None
    except SlurmError as error:
        return [f"Slurm does not answer here: {error}; try again, or ask whether the cluster is up"]
    except UserError as error:
        return error.problems
    if refusal is not None:
        return [f"slurm.nodes={config.slurm.nodes}: sbatch does not take the job: {refusal}; see the script"]
    return problems


def check_names(config: RunConfig) -> list[str]:
    """Problems of a name or path that cannot be written into a job script; then no script may be made at all."""
    paths = dict.fromkeys((f"{config.run_path}", f"{config.run_path.absolute()}"))
    return [
        f"{key}={show(text)} must be of letters, digits, spaces and . , : + @ = _ - to name a job, "
        "and not begin with -; choose another"
        for key, text in (("name", config.name), *(("run_dir", path) for path in paths))
        if not re.fullmatch(r"(?!-)[\w.,:+@=/ -]+", text)
    ][:2]


def check_container(slurm: SlurmConfig) -> Iterator[str]:
    """A line where the job would look in a container for the interpreter that submits."""
    if slurm.container is not None and slurm.python is None:
        yield (
            f"slurm.container={show(slurm.container)} needs slurm.python, the interpreter within the container, since "
            "the one that submits is not there; try slurm.python=python3"
        )


def check_environment(config: RunConfig) -> Iterator[str]:
    """A line for each variable of slurm.environment that the job takes from this shell but would not get."""
    exported = os.environ.get("SBATCH_EXPORT", "ALL").split(",")
    for number, name in enumerate(config.slurm.environment):
        if "=" in name:
            continue
        key = f"slurm.environment[{number}]={name}"
        if name not in os.environ:
            yield f"{key} must be set in the shell that submits, and is not; export {name}, or leave it out"
        elif not {"ALL", name} & set(exported):
            yield (
                f"{key} must be passed on to the job, and SBATCH_EXPORT={show(','.join(exported))} does not name it; "
                f"add {name}, or unset SBATCH_EXPORT"
            )


def check_run(config: RunConfig) -> list[str]:
    """Problems of the run directory, and of a notice too short for a save.

    The directory must be writable, on a shared file system with room for the checkpoints, and hold nothing but this
    run.
    """
    problems = _problems(lambda: check_writable(config)) + _problems(lambda: check_resume(config))
    problems += _problems(lambda: check_checkpoint_dir(config))
    problems = problems or _problems(lambda: check_parts(config.run_path, writing=True))
    problems = problems or _problems(lambda: check_newest_checkpoint(config))
    problems = problems or _problems(lambda: with_source(config))
    if not problems:
        problems = _problems(lambda: check_room(config)) + check_checkpoint(config)
    if not problems and (config.run_path / RUNS).exists():
        problems.append(
            f"run_dir={config.run_path} must not be a sweep's, and holds one; choose another name or run_dir"
        )
    kind = file_system(config.run_path)
    if kind in NODE_LOCAL:
        problems.append(
            f"run_dir={config.run_path} must be on a file system that the nodes share, and is on {kind}; "
            "choose a run_dir on the cluster's parallel file system"
        )
    slurm = config.slurm
    seconds = checkpoint_gib(config) / (SAVE_GIB_PER_SECOND * slurm.nodes)
    if slurm.notice_seconds < seconds:
        problems.append(
            f"slurm.notice_seconds={slurm.notice_seconds} must be enough for a save, about {seconds:.0f} s for "
            f"{checkpoint_gib(config):.3g} GiB from {slurm.nodes} nodes; try slurm.notice_seconds={round(2 * seconds)}"
        )
    return problems


def check_checkpoint(config: RunConfig) -> list[str]:
    """Problems that would keep the run from loading the checkpoint it resumes from; none where it would begin anew."""
    try:
        check_owner(config)
        check_checkpoints(config, is_new=saved_config(config.run_path) is None)
        return list(look_for_checkpoint(config).problems)
    except UserError as error:
        return error.problems
    except OSError as error:
        reason = error.strerror or str(error)
        return [f"run_dir={config.run_path} must have checkpoints that can be read: {reason}; check its permissions"]


def check_wandb(config: RunConfig) -> Iterator[str]:
    """A line where W&B is asked to be online and no key for it is found; the network is not used."""
    from launcher.watch.wandb_run import has_key

    asked = "metrics.wandb.mode=online" if config.metrics.wandb.mode == "online" else ""
    if config.metrics.wandb.mode == "auto" and os.environ.get("WANDB_MODE") == "online":
        asked = "WANDB_MODE=online"
    if asked and not has_key():
        yield f"{asked} must have a key, and none is here; run `wandb login`, set WANDB_API_KEY, or choose offline"


def check_data(config: RunConfig) -> list[str]:
    """Problems of the data: missing sources, or token files that are missing or cannot be opened as ranks do."""
    from data import rules

    return rules.check_data(config.data, config.model.vocab_size) or _problems(lambda: _open_data(config))


def check_hashes(config: RunConfig) -> list[str]:
    """A line for each token file or packing whose hash is not that of what was prepared. Reads all of them."""
    from data.prepared import locate, verify

    prepared = locate(config.data, config.model.vocab_size)
    return verify(config.data, prepared) if prepared is not None else []


def _open_data(config: RunConfig) -> None:
    from data.prepared import find_prepared

    if find_prepared(config.data, config.model.vocab_size) is None:
        raise UserError(
            [f"data.token_dir={config.data.token_dir} lacks this config's token files; run `roundtable prepare` first"]
        )
    check_tokens(config)
    check_evaluated_tasks(config)


def _problems(check: Callable[[], object]) -> list[str]:
    """The lines of the UserError or DataError that ``check`` raises; none where it raises neither."""
    try:
        check()
    except UserError as error:
        return error.problems
    except DataError as error:
        return str(error).splitlines()
    return []


def check_partition(config: RunConfig) -> Iterator[str]:
    """A line where the partition does not exist or is too small; of several named ones, one must be large enough."""
    found, default = partitions()
    of_shell = default_partition() if config.slurm.partition is None else None
    named, key = config.slurm.partition or of_shell or default, "SBATCH_PARTITION" if of_shell else "slurm.partition"
    if named is None:
        yield f"slurm.partition=null needs a cluster with a default partition; try {join_or(sorted(found))}"
        return
    names = named.split(",")
    if unknown := [name for name in names if name not in found]:
        which = f", and {show(unknown[0])} is none" if len(names) > 1 else ""
        yield f"{key}={named} must be a partition of this cluster{which}; try {join_or(sorted(found))}"
        return
    lacking = [list(check_size(config.slurm, found[name])) for name in names]
    if all(lacking):
        yield from lacking[0]


def check_size(slurm: SlurmConfig, partition: Partition) -> Iterator[str]:
    """A line each where the job asks for more nodes, GPUs or time than the partition has."""
    name = partition.name
    if slurm.nodes > partition.nodes:
        most = partition.nodes
        yield f"slurm.nodes={slurm.nodes} must be at most the {most} nodes of partition {name}; try {most}"
    elif slurm.nodes + slurm.spare_nodes > partition.nodes:
        left = partition.nodes - slurm.nodes
        yield (
            f"slurm.spare_nodes={slurm.spare_nodes} must be at most the {left} that slurm.nodes={slurm.nodes} leaves "
            f"of partition {name}; try {left}"
        )
    if slurm.gpus_per_node > partition.gpus_per_node:
        yield (
            f"slurm.gpus_per_node={slurm.gpus_per_node} must be at most the {partition.gpus_per_node} that a node of "
            f"partition {name} has; try {partition.gpus_per_node}"
        )
    if partition.max_minutes is not None and slurm.time_minutes > partition.max_minutes:
        yield (
            f"slurm.time_minutes={slurm.time_minutes} must be at most the {partition.max_minutes} that partition "
            f"{name} allows; try {partition.max_minutes}, and --chain for more"
        )


def check_unused(config: RunConfig, run_paths: Sequence[Path]) -> Iterator[str]:
    """A line where a live job already trains in one of the run directories or in the config's own."""
    mine = {path.absolute() for path in (config.run_path, *run_paths)}
    for job in [job for job in live_jobs() if mine & {job.run_path, job.submitted}][:1]:
        run = shlex.quote(str(config.run_path))
        yield (
            f"name={config.name} must not be in use by a live job, and job {job.job_id} ({job.state}) trains in "
            f"{config.run_path}; choose another name or run_dir, or `roundtable cancel {run}`"
        )


def file_system(path: Path) -> str:
    """The kind of file system that ``path`` is or would be on: ext4, nfs4, lustre, tmpfs, ...; "" where unknown."""
    mounts, existing = Path("/proc/mounts"), Path(nearest_existing(path)).resolve()
    best, kind = -1, ""
    for line in mounts.read_text().splitlines() if mounts.exists() else ():
        _, point, each, *_ = line.split()
        point = point.replace("\\040", " ")
        if existing.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), each
    return kind


def notes(config: RunConfig) -> Iterator[str]:
    """Notes and warnings about a job that are no reason to refuse it, a line each."""
    yield from wandb_notes(config, shlex.quote(str(config.run_path)))
    yield from checkpoint_notes(config)


def node_notes(config: RunConfig) -> Iterator[str]:
    """A warning where fewer nodes are up than the job asks for."""
    slurm = config.slurm
    asked = slurm.nodes + slurm.spare_nodes
    try:
        up = nodes_up(slurm.partition)
    except (SlurmError, OSError):
        return
    if up is not None and up < asked:
        which = f"partition {slurm.partition}" if slurm.partition is not None else "the partition"
        yield (
            f"warning: only {up} nodes of {which} are up, and the job of {asked} waits for the others; "
            "`sinfo -R` says why they are not"
        )


def processor_notes(config: RunConfig, script: str) -> Iterator[str]:
    """A warning where Slurm would give processes with GPUs hardly any cores, as it does where none are asked for."""
    slurm = config.slurm
    if slurm.cpus_per_task is not None or slurm.gpus_per_node == 0:
        return
    try:
        found = processors_of(script, slurm)
    except (SlurmError, OSError):
        return
    n_processes = (slurm.nodes + slurm.spare_nodes) * slurm.n_tasks_per_node
    if found is not None and found < FEWEST_PROCESSORS * n_processes:
        yield (
            f"warning: Slurm gives the {n_processes} processes {found} processors in all, and one with a GPU is slow "
            f"on fewer than {FEWEST_PROCESSORS}; set slurm.cpus_per_task to its share of a node's cores"
        )


def checkpoint_notes(config: RunConfig) -> Iterator[str]:
    """Lines that say from which step the run resumes, and which newer checkpoints are damaged."""
    found = look_for_checkpoint(config)
    yield from (f"warning: {line}; it will be set aside" for line in found.damaged)
    if found.step is not None and found.step >= config.train.steps:
        yield f"{config.run_path} is complete: step {found.step} of train.steps={config.train.steps}"
    elif found.step is not None:
        yield f"{config.run_path} holds checkpoints: the run goes on from step {found.step}"


def wandb_notes(config: RunConfig, runs: str) -> Iterator[str]:
    """Lines that say whether W&B will be online, and warn where its server does not answer from here.

    ``runs`` is the run directory, or a glob of several, quoted for a shell.
    """
    from launcher.watch.wandb_run import INIT_SECONDS, choose_mode, unreachable

    mode = choose_mode(config.metrics.wandb.mode)
    later = f"`wandb sync {runs}/wandb/*run-*` uploads it"
    if mode != "disabled":
        yield f"W&B: {mode}" + ("" if mode == "online" else f"; {later}")
    reason = unreachable() if mode == "online" else None
    if reason is not None:
        yield (
            f"warning: W&B: {reason}; where the nodes cannot reach it either, each start waits {INIT_SECONDS:g} s and "
            f"then logs offline ({later}), which metrics.wandb.mode=offline does at once"
        )
