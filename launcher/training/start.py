"""The start of a run, before the training loop: checks, preparing token files, claiming the run directory, ranks."""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from data.errors import DataError
from data.order import place_after
from data.places import nearest_existing, why_not_writable
from launcher.config.checked import load_checked
from launcher.config.tree import RunConfig, TrainConfig
from launcher.console import tell
from launcher.errors import UNREACHABLE, UserError, why_refused
from launcher.guard.fence import Fence, StaleRun
from launcher.guard.restarts import Restart, Restarts, newest_checkpoint, restart_by_torchrun
from launcher.limits import check_limits, check_local_ranks
from launcher.training.heap import let_segments_grow
from launcher.training.init_from import with_source
from launcher.training.run_dir import (
    check_resume,
    check_run_dir,
    check_writable,
    claim,
    enter_start_folder,
    newest_manifest,
    refusing_unreachable,
    unrecorded_changes,
)
from parallel.checkpoint.manifest import Manifest
from parallel.checkpoint.places import is_remote, local_path, open_store
from parallel.checkpoint.store import in_order
from parallel.processes.lifeline import end_with_job
from parallel.processes.start import RankError, run_ranks, tell_launcher
from parallel.processes.stop import ending, hearing
from parallel.processes.world import in_step, ranks_on_node, set_rank_environment, world_size_from_environment

Answer = TypeVar("Answer")


def start_training(path: Path, overrides: Sequence[str], ranks: int | None, max_restarts: int = 0) -> int:
    """Trains the config on ``ranks`` local processes, or as one rank of a torchrun or srun job. Returns the exit code.

    On one machine, missing token files are prepared first; a job instead refuses to start and names the command that
    prepares them. After a crash, all local processes are started again, at most ``max_restarts`` times.
    """
    path = enter_start_folder(path, overrides)
    job_size = world_size_from_environment()
    if job_size is not None:
        if max_restarts:
            remedy = "leave it out, and give torchrun --max-restarts or let the job be requeued"
            raise UserError([f"--max-restarts={max_restarts} must be 0 under srun or torchrun; {remedy}"])
        return join_job(path, overrides, ranks, job_size)
    check_local_ranks(ranks)
    with ending():
        return train_here(path, overrides, ranks, max_restarts)


def train_here(path: Path, overrides: Sequence[str], ranks: int | None, max_restarts: int) -> int:
    """Checks, prepares and claims the run, then trains it on local processes; returns the exit code.

    A request to stop that comes before the processes listen for one ends this process with exit code STOPPED.
    """
    n_ranks = ranks if ranks is not None else default_ranks()
    check_limits(n_ranks)
    config = with_source(load_checked(path, overrides, world_size=n_ranks))
    changed = check_start(config)
    check_gpus(n_ranks)
    check_run_dir(config)
    prepare_missing(config)
    check_tokens(config)
    check_evaluated_tasks(config)
    lock = claim(config)
    try:
        return run_locally(config, changed, n_ranks, lock.fence, max_restarts)
    except KeyboardInterrupt:
        options = ["--ranks", str(n_ranks), *(["--max-restarts", str(max_restarts)] if max_restarts else [])]
        tell(how_to_go_on(config, shlex.join(["roundtable", "train", str(path), *overrides, *options])))
        raise
    finally:
        lock.close()


def how_to_go_on(config: RunConfig, command: str) -> str:
    """The line shown after an interrupt: the last saved step, and the command that resumes from it."""
    step = newest_checkpoint(config.checkpoint_location)
    if step == 0:
        return f"interrupted: {config.run_path} holds no checkpoint yet; `{command}` begins again"
    saved = f"interrupted: the last checkpoint of {config.run_path} is step {step}, and later steps are not saved"
    return f"{saved}; `{command}` goes on from it"


def join_job(path: Path, overrides: Sequence[str], ranks: int | None, job_size: int) -> int:
    """Trains as one rank of a running job of ``job_size`` processes; returns the exit code.

    Every rank makes the same checks, so that all of them refuse a bad config, or a disagreement between ranks.
    """
    end_with_job()
    check_ranks(ranks, job_size)
    check_limits(job_size, ranks_on_node(job_size))
    config = with_source(load_checked(path, overrides, world_size=job_size))
    changed = check_start(config)
    check_prepared(config, path)
    check_tokens(config)
    check_evaluated_tasks(config)
    set_rank_environment()
    let_segments_grow()  # the roll call looks at the rank's GPU, and so starts CUDA
    from launcher.guard.agreement import agree
    from launcher.training.loop import train
    from parallel.processes.roll_call import RollCallError

    try:
        agreed = agree(config)
    except RollCallError as error:
        if error.is_disagreement:
            raise UserError(error.lines) from None
        tell(error)
        return 1
    with hearing(ends_at_second=True) as stop:
        fence = agreed.lock.fence if agreed.lock is not None else None
        try:
            code = train(config, changed, stop, restart_by_torchrun(), fence)
        except (StaleRun, *UNREACHABLE) as error:
            tell(last_word(error))
            return 1
    agreed.leave(code)
    return code


def check_ranks(ranks: int | None, job_size: int) -> None:
    """Raises UserError where --ranks is given and differs from the job's number of processes."""
    if ranks is None or ranks == job_size:
        return
    rule = f"--ranks={ranks} must equal the job's {job_size} process{'es' if job_size > 1 else ''}"
    if in_step() and "RANK" not in os.environ:
        remedy = f"give `srun --ntasks={ranks}` instead, or put `env -u SLURM_PROCID` before the command"
        raise UserError([f"{rule}, since SLURM_PROCID makes this one of them; {remedy} for {ranks} of its own"])
    raise UserError([f"{rule}; leave it out under torchrun"])


def check_start(config: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, old value, new value) of each change since the run's last start, after all of ``start_checks``.

    Raises UserError for whatever can be refused before token files are prepared.
    """
    for check in start_checks().values():
        check(config)
    return check_resume(config)


def start_checks() -> dict[str, Callable[[RunConfig], object]]:
    """The checks that a start makes before it changes anything: name of what is checked -> function, in order.

    Each raises UserError (or DataError) where it refuses the config.
    """
    from data.foreign import check_foreign_files
    from launcher.training.compiling import check_compiler
    from launcher.training.flash import check_flash_attention
    from launcher.training.remote_tokens import check_remote_tokens

    return {
        "run directory": check_writable,
        "config of the run's last start": check_resume,
        "token files not prepared here": lambda config: check_foreign_files(config.data, config.model.vocab_size),
        "token files at URLs": check_remote_tokens,
        "checkpoint.dir": check_checkpoint_dir,
        "room for checkpoints": check_room,
        "compiler": lambda config: check_compiler(config.train.compile),
        "flash attention": lambda config: check_flash_attention(config.train.flash_attention),
        "evaluation tasks": check_named_tasks,
    }


def check_prepared(config: RunConfig, path: Path) -> None:
    """Raises UserError where token files are missing, naming the command that prepares them: a job prepares none."""
    from data.prepared import find_prepared

    if find_prepared(config.data, config.model.vocab_size) is None:
        raise UserError(
            [
                f"data.token_dir={config.data.token_dir} lacks this config's token files; "
                f"run `roundtable prepare {shlex.quote(str(path))}` first"
            ]
        )


def check_tokens(config: RunConfig) -> None:
    """Opens the datasets that the ranks will open, so that bad token files are refused before anything is created.

    Raises DataError or UserError where files are damaged, empty, changed since the run began, or hold too few samples.
    """
    from data.dataset import open_dataset
    from launcher.training.token_files import check_files_of_run

    for split in ("train", "heldout") if config.train.eval_every_steps is not None else ("train",):
        dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split=split)
        if split == "train":
            check_enough(dataset.stages.end, config.train, newest_manifest(config))
    check_files_of_run(config, config.run_path)


def check_named_tasks(config: RunConfig) -> None:
    """Checks train.eval_tasks as far as is possible without a tokenizer. Raises UserError."""
    if config.train.eval_tasks:
        from launcher.training.live_tasks import check_task_files

        check_task_files(config)


def check_evaluated_tasks(config: RunConfig) -> None:
    """Checks train.eval_tasks in full, with the tokenizer, before anything is created. Raises UserError."""
    if config.train.eval_tasks:
        from launcher.training.live_tasks import check_tasks

        check_tasks(config)


def check_enough(n_samples: int | None, train: TrainConfig, newest: Manifest | None = None) -> None:
    """Raises UserError where train.steps takes more than ``n_samples``, which data.sources.max_epochs leaves in all.

    None means no limit. Only the steps after ``newest``, the checkpoint that the run resumes from, are counted.
    """
    step = newest.step if newest is not None else 0
    if n_samples is None or train.steps <= step:
        return
    scalars = newest.scalars if newest is not None else {"consumed": 0, "skipped": []}
    to_come = train.batches.samples_in(train.steps) - train.batches.samples_in(step)
    if place_after(scalars["consumed"], to_come, scalars["skipped"]) <= n_samples:
        return
    if newest is None:
        rule = f"leaves {n_samples} sequences in all, and train.steps={train.steps} takes {to_come}"
        raise UserError(
            [f"data.sources.max_epochs {rule}; raise it for a source, set it to null, or lower train.steps"]
        )
    rule = f"leaves {n_samples} sequences in all, of which the run has come to {scalars['consumed']} in step {step}"
    remedy = "lower train.steps or train.global_batch_size"
    raise UserError([f"data.sources.max_epochs {rule}, and train.steps={train.steps} takes {to_come} more; {remedy}"])


def default_ranks() -> int:
    """The number of local processes where none is given: one for each GPU, or one on a machine without GPUs."""
    import torch

    return max(1, torch.cuda.device_count())


def check_gpus(n_ranks: int) -> None:
    """Raises UserError for more local processes than GPUs, if there are any: NCCL allows one rank for each GPU."""
    import torch

    n_gpus = torch.cuda.device_count()
    if 0 < n_gpus < n_ranks:
        remedy = f"try {n_gpus}, or CUDA_VISIBLE_DEVICES= before the command to train on the CPU"
        raise UserError([f"--ranks={n_ranks} must be at most {n_gpus}, this machine's GPUs; {remedy}"])


def prepare_missing(config: RunConfig) -> None:
    """Prepares the config's token files where they are missing, showing progress."""
    from data.prepared import find_prepared

    if find_prepared(config.data, config.model.vocab_size) is None:
        from launcher.commands.prepare import prepare_shown

        prepare_shown(config)


def check_checkpoint_dir(config: RunConfig) -> None:
    """Raises UserError for a checkpoint.dir that cannot be opened, or that does not outlive the process. Reads only."""
    location = config.checkpoint.dir
    if location is None:
        return
    if not is_remote(location):
        rule = why_not_writable(local_path(location))
        if rule is not None:
            raise UserError([f"checkpoint.dir={location} {rule}; choose another, or null (RUN_DIR/checkpoints)"])
        return
    if location.startswith("memory://"):
        raise UserError([f"checkpoint.dir={location} must outlive the process; try a path or s3://bucket/prefix"])
    with refusing_unreachable("checkpoint.dir", location):
        open_store(location).names()


def check_room(config: RunConfig) -> None:
    """Raises UserError where the disk has no room for the checkpoints that the run will keep, and one more.

    The additional one is being written. Checkpoints on an object store are not checked.
    """
    checkpoint = config.checkpoint
    if is_remote(config.checkpoint_location):
        return
    n_wanted, needed_gib = room_needed(config)
    one_gib = checkpoint_gib(config)
    free_gib = room_free_gib(local_path(config.checkpoint_location))
    if needed_gib > free_gib:
        for_good = checkpoint.keep_every_steps and config.train.steps // checkpoint.keep_every_steps
        kept = f"checkpoint.keep_last={checkpoint.keep_last}"
        kept += f", checkpoint.keep_best={checkpoint.keep_best}" if checkpoint.keep_best else ""
        kept += f", checkpoint.keep_every_steps={checkpoint.keep_every_steps}" if for_good else ""
        remedy = "raise checkpoint.keep_every_steps" if for_good else "lower checkpoint.keep_last"
        key, place = ("run_dir", config.run_path) if checkpoint.dir is None else ("checkpoint.dir", checkpoint.dir)
        raise UserError(
            [
                f"{key}={place} must have room for {n_wanted} checkpoints of {one_gib:.3g} GiB "
                f"({kept}, and one being written), and has {free_gib:.3g} GiB free; "
                f"{remedy}, or choose a {key} on another disk"
            ]
        )


def room_needed(config: RunConfig) -> tuple[int, float]:
    """(the largest number of checkpoints that exist at once, GiB needed for those not there yet), on a file system."""
    checkpoint = config.checkpoint
    planned = config.train.steps // checkpoint.every_steps + 1 if checkpoint.every_steps else 1
    for_good = config.train.steps // checkpoint.keep_every_steps if checkpoint.keep_every_steps else 0
    wanted = min(checkpoint.keep_last + checkpoint.keep_best + for_good, planned) + 1
    here = len(in_order([path.name for path in local_path(config.checkpoint_location).glob("step-*")]))
    return wanted, checkpoint_gib(config) * max(1, wanted - here)


def room_free_gib(path: Path) -> float:
    """Free GiB on the disk where ``path`` is or would be."""
    import shutil

    return shutil.disk_usage(nearest_existing(path)).free / 2**30


def checkpoint_gib(config: RunConfig) -> float:
    """The size of one checkpoint in GiB: the weights and the optimizer states, all in fp32."""
    from modeling.logical import logical_parameters

    tensors = logical_parameters(config.model).values()
    return sum(4 * (1 + len(config.optimizer.states_of(each.weight))) * each.numel for each in tensors) / 2**30


def run_locally(
    config: RunConfig, changed: list[tuple[str, Any, Any]], n_ranks: int, fence: Fence, max_restarts: int = 0
) -> int:
    """Trains in ``n_ranks`` processes of this machine, starting them again after a crash; returns the exit code.

    A failure is printed once. Where token files became unreadable during the run, that is printed too, and the exit
    code is 2. Each start has new processes, a new port, and resumes from the last good checkpoint.
    """
    from parallel.mesh import Degrees

    places = Degrees.of(config.parallel, n_ranks).places()
    restarts = Restarts(config.checkpoint_location, max_restarts)
    restart: Restart | None = None
    options: dict[str, Any] = {"preload": ["launcher.training.loop"], "passes_stop": True, "places": places}
    while True:
        try:
            return max(run_ranks(train_rank, n_ranks, config, changed, restart, fence, **options))
        except RankError as error:
            failure = error
        if failure.exit_code != 2:  # else the rank has printed its lines
            tell(failure)
            if (spoilt := spoilt_tokens(config)) is not None:
                tell(spoilt)
                return 2
        following = restarts.next(failure.exit_code, first_line(failure), stop_asked=failure.stop_asked)
        if isinstance(following, str):
            if following:
                tell(following)
            return failure.exit_code
        restart, changed = following, unrecorded_changes(config)
        what = f"step {restarts.newest}" if restarts.newest else "the start"
        tell(f"restart {restart.number} of {restart.allowed}, from {what}")


def spoilt_tokens(config: RunConfig) -> Exception | None:
    """The error that the run's token files now raise; None where they can be read.

    A rank that reads a mapped file beyond its truncated end dies by SIGBUS, without a message. An OSError counts as
    readable: a disk or store that fails now may work at the next start.
    """
    try:
        check_tokens(config)
    except (DataError, UserError) as error:
        return error
    except OSError:
        return None
    return None


def first_line(failure: Exception) -> str:
    """A failure in one line: its first line, and for a traceback also the exception."""
    lines = str(failure).splitlines()
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 and lines[1].startswith("Traceback") else lines[0]


def train_rank(config: RunConfig, changed: list[tuple[str, Any, Any]], restart: Restart | None, fence: Fence) -> int:
    """Trains as one of the local ranks, within its own process; returns the exit code."""
    with hearing(ends_at_second=False) as stop:  # the launching process ends its ranks
        from launcher.training.loop import train

        return exit_two_for(lambda: train(config, changed, stop, restart, fence))


def exit_two_for(work: Callable[[], Answer]) -> Answer:
    """What ``work`` returns, within a process that ``run_ranks`` started; errors become an exit code.

    A user's mistake that is found only now (such as a token id outside the vocabulary) is printed, and the process
    exits with code 2. Where the run directory was removed, the run was started elsewhere, or a store does not answer,
    the launching process is told the reason, which it prints, and the exit code is 1.
    """
    try:
        return work()
    except (DataError, UserError) as error:
        tell(error)
        raise SystemExit(2) from None
    except (StaleRun, *UNREACHABLE) as error:
        tell_launcher(last_word(error), 1)
        raise SystemExit(1) from None


def last_word(error: StaleRun | OSError) -> str:
    """The reason in one line why a run ends after this error."""
    line = why_refused(error) if isinstance(error, OSError) else None
    return line if line is not None else str(error)
