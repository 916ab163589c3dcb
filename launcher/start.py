"""What comes before the loop: checks, missing token files, the run directory, and the ranks."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.places import nearest_existing, why_not_writable
from launcher.config.checked import load_checked
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.fence import Fence
from launcher.restarts import Restart, Restarts, restart_by_torchrun
from launcher.run_dir import check_free, check_resume, check_writable, claim
from parallel.checkpoint.folder import is_remote, open_store
from parallel.stop import hearing
from parallel.world import set_rank_environment, world_size_from_environment


def start_training(path: Path, overrides: Sequence[str], ranks: int | None, max_restarts: int = 0) -> int:
    """Trains the config on ``ranks`` local processes, or as one rank of a torchrun or srun job. Returns the exit code.

    On one machine, missing token files are prepared first; a job refuses instead and names the command. After a crash
    of local processes, all are started again, ``max_restarts`` times at most.
    """
    job_size = world_size_from_environment()
    if job_size is not None:
        if max_restarts:
            remedy = "leave it out, and give torchrun --max-restarts or let the job be requeued"
            raise UserError([f"--max-restarts={max_restarts} must be 0 under srun or torchrun; {remedy}"])
        return join_job(path, overrides, ranks, job_size)
    n_ranks = ranks if ranks is not None else default_ranks()
    config = load_checked(path, overrides, world_size=n_ranks)
    changed = check_start(config)
    check_free(config)
    prepare_missing(config)
    check_tokens(config)
    lock = claim(config)
    try:
        return run_locally(config, changed, n_ranks, lock.fence, max_restarts)
    finally:
        lock.close()


def join_job(path: Path, overrides: Sequence[str], ranks: int | None, job_size: int) -> int:
    """This process is a rank already: trains, or refuses as all other ranks do."""
    if ranks is not None and ranks != job_size:
        raise UserError(
            [f"--ranks={ranks} must equal the job's {job_size} processes; leave it out under srun or torchrun"]
        )
    config = load_checked(path, overrides, world_size=job_size)
    changed = check_start(config)
    from data.prepared import find_prepared

    if find_prepared(config.data, config.model.vocab_size) is None:
        raise UserError(
            [
                f"data.token_dir={config.data.token_dir} lacks this config's token files; "
                f"run `roundtable prepare {path}` first"
            ]
        )
    check_tokens(config)
    set_rank_environment()
    from launcher.agreement import agree
    from launcher.train import train
    from parallel.roll_call import RollCallError

    try:
        agreed = agree(config)
    except RollCallError as error:
        if error.is_disagreement:
            raise UserError(error.lines) from None
        print(error, file=sys.stderr)
        return 1
    with hearing(ends_at_second=True) as stop:
        fence = agreed.lock.fence if agreed.lock is not None else None
        code = train(config, changed, stop, restart_by_torchrun(), fence)
    agreed.leave()
    return code


def check_start(config: RunConfig) -> list[tuple[str, Any, Any]]:
    """What changed since the run's last start; refuses what can be refused before token files are prepared."""
    from data.dataset import check_foreign_files

    check_writable(config)
    changed = check_resume(config)
    check_foreign_files(config.data, config.model.vocab_size)
    check_checkpoint_dir(config)
    check_room(config)
    return changed


def check_tokens(config: RunConfig) -> None:
    """Opens what the ranks will open, so that damaged or empty token files are refused before anything is created."""
    from data.dataset import open_dataset

    for split in ("train", "heldout") if config.train.eval_every_steps is not None else ("train",):
        open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split=split)


def default_ranks() -> int:
    """One process for each GPU, or one where there is none."""
    import torch

    return max(1, torch.cuda.device_count())


def prepare_missing(config: RunConfig) -> None:
    """Prepares token files that are not there, showing progress."""
    from data.prepared import find_prepared

    if find_prepared(config.data, config.model.vocab_size) is None:
        from launcher.prepare import prepare_shown

        prepare_shown(config)


def check_checkpoint_dir(config: RunConfig) -> None:
    """Refuses a checkpoint.dir that cannot be opened, or that is gone when the process ends. Changes nothing."""
    location = config.checkpoint.dir
    if location is None:
        return
    if not is_remote(location):
        reason = why_not_writable(location)
        if reason is not None:
            rule = f"must be a folder that can be written to, but {reason}"
            raise UserError([f"checkpoint.dir={location} {rule}; choose another, or null (RUN_DIR/checkpoints)"])
        return
    if location.startswith("memory://"):
        raise UserError([f"checkpoint.dir={location} must outlive the process; try a path or s3://bucket/prefix"])
    try:
        open_store(location).names()
    except (ValueError, ImportError, OSError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            [
                f"checkpoint.dir={location} must be a place that fsspec can list, and it says: {reason}; "
                "install the library that it names, check address and keys, or leave checkpoint.dir=null"
            ]
        ) from None


def check_room(config: RunConfig) -> None:
    """Refuses a run whose checkpoints cannot fit on its disk, before anything is created.

    One checkpoint more than those that stay exists while it is being written.
    """
    checkpoint = config.checkpoint
    if is_remote(config.checkpoint_location):
        return
    n_wanted, needed_gib = room_needed(config)
    one_gib = checkpoint_gib(config)
    free_gib = room_free_gib(Path(config.checkpoint_location))
    if needed_gib > free_gib:
        for_good = checkpoint.keep_every_steps and config.train.steps // checkpoint.keep_every_steps
        kept = f"checkpoint.keep_last={checkpoint.keep_last}"
        kept += f", checkpoint.keep_best={checkpoint.keep_best}" if checkpoint.keep_best else ""
        kept += f", checkpoint.keep_every_steps={checkpoint.keep_every_steps}" if for_good else ""
        remedy = "raise checkpoint.keep_every_steps" if for_good else "lower checkpoint.keep_last"
        raise UserError(
            [
                f"run_dir={config.run_path} must have room for {n_wanted} checkpoints of {one_gib:.3g} GiB "
                f"({kept}, and one being written), and has {free_gib:.3g} GiB free; "
                f"{remedy}, or choose a run_dir on another disk"
            ]
        )


def room_needed(config: RunConfig) -> tuple[int, float]:
    """The most checkpoints that a run on a file system has at once, and the GiB of those that are not there yet."""
    checkpoint = config.checkpoint
    planned = config.train.steps // checkpoint.every_steps + 1 if checkpoint.every_steps else 1
    for_good = config.train.steps // checkpoint.keep_every_steps if checkpoint.keep_every_steps else 0
    wanted = min(checkpoint.keep_last + checkpoint.keep_best + for_good, planned) + 1
    here = len(list(Path(config.checkpoint_location).glob("step-*")))
    return wanted, checkpoint_gib(config) * max(1, wanted - here)


def room_free_gib(path: Path) -> float:
    """The free space where ``path`` is or would be."""
    import shutil

    return shutil.disk_usage(nearest_existing(path)).free / 2**30


def checkpoint_gib(config: RunConfig) -> float:
    """The size of one checkpoint: masters and the optimizer's states in fp32."""
    from modeling.counts import count_parameters
    from modeling.optimizers.build import state_names

    copies = 1 + len(state_names(config.optimizer))
    return 4 * copies * count_parameters(config.model).total / 2**30


def run_locally(
    config: RunConfig, changed: list[tuple[str, Any, Any]], n_ranks: int, fence: Fence, max_restarts: int = 0
) -> int:
    """Trains in ``n_ranks`` processes of this machine, starting them again after a crash; returns the exit code.

    A failure is printed once. Each start has new processes, a port of its own, and the last good checkpoint.
    """
    from parallel.mesh import Degrees
    from parallel.process import RankError, run_ranks

    places = Degrees.of(config.parallel, n_ranks).places()
    restarts = Restarts(config.checkpoint_location, max_restarts)
    restart: Restart | None = None
    options: dict[str, Any] = {"preload": ["launcher.train"], "passes_stop": True, "places": places}
    while True:
        try:
            return max(run_ranks(train_rank, n_ranks, config, changed, restart, fence, **options))
        except RankError as error:
            failure = error
        if failure.exit_code != 2:  # else the rank has printed its lines
            print(failure, file=sys.stderr)
        following = restarts.next(failure.exit_code, first_line(failure), stop_asked=failure.stop_asked)
        if isinstance(following, str):
            if following:
                print(following, file=sys.stderr)
            return failure.exit_code
        restart, changed = following, []  # what changed since the last start is on record
        what = f"step {restarts.newest}" if restarts.newest else "the start"
        print(f"restart {restart.number} of {restart.allowed}, from {what}", file=sys.stderr, flush=True)


def first_line(failure: Exception) -> str:
    """A failure in a line: of a traceback, the rank and the exception."""
    lines = str(failure).splitlines()
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 and lines[1].startswith("Traceback") else lines[0]


def train_rank(config: RunConfig, changed: list[tuple[str, Any, Any]], restart: Restart | None, fence: Fence) -> int:
    """One rank's process; returns the exit code."""
    with hearing(ends_at_second=False) as stop:  # the launching process ends its ranks
        from launcher.train import train

        return exit_two_for(lambda: train(config, changed, stop, restart, fence))


def exit_two_for(work: Callable[[], int]) -> int:
    """What ``work`` returns; the user's mistakes found on the way (a foreign token id) are printed, with code 2."""
    try:
        return work()
    except (DataError, UserError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
