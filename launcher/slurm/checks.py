"""What is looked at before a job is submitted, so that it does not fail after a night in the queue."""

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
from launcher.slurm.queue import Partition, SlurmError, live_jobs, partitions, require, would_take
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
SAVE_GIB_PER_SECOND = 0.25  # of one node, at least; for the estimate of a save's time only


def check_job(config: RunConfig, script: str) -> list[str]:
    """Every reason not to submit, one line each. Changes nothing."""
    problems = check_here(config)
    return problems + check_cluster(config, script, [config.run_path], is_right=not problems)


def check_here(config: RunConfig) -> list[str]:
    """What can be said of one run without Slurm."""
    return [*check_environment(config), *check_run(config), *check_data(config), *check_wandb(config)]


def check_cluster(config: RunConfig, script: str, run_paths: Sequence[Path], *, is_right: bool) -> list[str]:
    """What Slurm says of the job that trains in ``run_paths``; of the script only where all else ``is_right``."""
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
    """The name and the path can be written into a job script. No script is made of others, not even to be shown."""
    paths = dict.fromkeys((f"{config.run_path}", f"{config.run_path.absolute()}"))
    return [
        f"{key}={show(text)} must be of letters, digits, spaces and . , : + @ = _ - to name a job, "
        "and not begin with -; choose another"
        for key, text in (("name", config.name), *(("run_dir", path) for path in paths))
        if not re.fullmatch(r"(?!-)[\w.,:+@=/ -]+", text)
    ][:2]


def check_environment(config: RunConfig) -> Iterator[str]:
    """The variables that the job takes from this shell are there, and sbatch passes them on."""
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
    """The run directory: writable, shared, with room, of this run; and the notice is long enough for a save."""
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
    """The checkpoint that the run would go on from can be loaded; nothing where it would begin."""
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
    """W&B has a key where it is to be online, whatever becomes of the network."""
    from launcher.watch.wandb_run import has_key

    asked = "metrics.wandb.mode=online" if config.metrics.wandb.mode == "online" else ""
    if config.metrics.wandb.mode == "auto" and os.environ.get("WANDB_MODE") == "online":
        asked = "WANDB_MODE=online"
    if asked and not has_key():
        yield f"{asked} must have a key, and none is here; run `wandb login`, set WANDB_API_KEY, or choose offline"


def check_data(config: RunConfig) -> list[str]:
    """The sources are there, and so are their token files, which can be opened, as the ranks will."""
    from data import rules

    return rules.check_data(config.data, config.model.vocab_size) or _problems(lambda: _open_data(config))


def check_hashes(config: RunConfig) -> list[str]:
    """The token files still are what was prepared. Reads all of them."""
    from data.prepared import locate, verify

    prepared = locate(config.data, config.model.vocab_size)
    return verify(prepared) if prepared is not None else []


def _open_data(config: RunConfig) -> None:
    from data.prepared import find_prepared

    if find_prepared(config.data, config.model.vocab_size) is None:
        raise UserError(
            [f"data.token_dir={config.data.token_dir} lacks this config's token files; run `roundtable prepare` first"]
        )
    check_tokens(config)
    check_evaluated_tasks(config)


def _problems(check: Callable[[], object]) -> list[str]:
    """The lines of the user's mistake that ``check`` raises."""
    try:
        check()
    except UserError as error:
        return error.problems
    except DataError as error:
        return str(error).splitlines()
    return []


def check_partition(config: RunConfig) -> Iterator[str]:
    """The partition is there, and has what is asked of it: where several are named, one of them."""
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
    """The partition has the nodes, the GPUs and the time that are asked for."""
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
    """No live job trains in the run directories, nor in any of the sweep's."""
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
    """What is worth saying and no reason not to submit."""
    yield from wandb_notes(config, shlex.quote(str(config.run_path)))
    yield from checkpoint_notes(config)


def checkpoint_notes(config: RunConfig) -> Iterator[str]:
    """Where the run goes on from, and which newer checkpoints are damaged."""
    found = look_for_checkpoint(config)
    yield from (f"warning: {line}; it will be set aside" for line in found.damaged)
    if found.step is not None and found.step >= config.train.steps:
        yield f"{config.run_path} is complete: step {found.step} of train.steps={config.train.steps}"
    elif found.step is not None:
        yield f"{config.run_path} holds checkpoints: the run goes on from step {found.step}"


def wandb_notes(config: RunConfig, runs: str) -> Iterator[str]:
    """Whether W&B will be online, and whether its server answers; the nodes may reach less than a login node.

    ``runs`` is the run directory, or a glob of several, as a shell takes it.
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
