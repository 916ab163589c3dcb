"""Small runs in which a rank dies or hangs: under Roundtable's launcher, or started one by one as srun does it."""

import dataclasses
import os
import signal
import sys
import time
from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

import psutil

import hang_job
from launcher.config.dump import dump_config
from launcher.config.tree import CheckpointConfig, MetricsConfig, RunConfig, WandbConfig
from launcher.training.run_dir import claim
from layout_runs import run_config
from parallel.mesh import Degrees
from parallel.processes.start import RankError, claimed_port, fork_server, rank_environments, run_ranks

FAULT_STEP = 3


def small_run(folder: Path, tokens: str, *, every_steps: int | None = None, **changes: Any) -> RunConfig:
    """The config of a run of six steps in ``folder``/run, also written to ``folder``/run.yaml.

    ``changes`` whose names end in ``seconds`` are keys of the train section.
    """
    train = {"step_timeout_seconds": 300, **{key: changes.pop(key) for key in list(changes) if key.endswith("seconds")}}
    config = dataclasses.replace(
        run_config(tokens, **{"steps": 6, **changes}),
        run_dir=str(folder / "run"),
        checkpoint=CheckpointConfig(every_steps=every_steps),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, **train))
    (folder / "run.yaml").write_text(dump_config(config))
    return config


def run_with_launcher(config: RunConfig, n_ranks: int, fault: str, rank: int, step: int = FAULT_STEP) -> RankError:
    """The error with which a run under Roundtable's launcher (`train --ranks`) ends because of the fault."""
    places = Degrees.of(config.parallel, n_ranks).places()
    with claim(config) as held:
        try:
            arguments = (hang_job.train_rank, n_ranks, fault, rank, step, config, [], None, held.fence)
            run_ranks(*arguments, timeout_seconds=280, threads=1, places=places, preload=["launcher.training.loop"])
        except RankError as error:
            return error
    raise AssertionError("nothing failed")


@dataclasses.dataclass
class Ended:
    """The exit code and the stderr of one process."""

    code: int  # negative: a signal
    stderr: str


def run_alone(config: RunConfig, n_ranks: int, fault: str, rank: int, seconds: float = 200) -> list[Ended]:
    """Runs `train CONFIG` once for each rank in a job's environment, without a launcher; returns how each ended.

    A rank that the fault "stopped" is continued after all others have ended.
    """
    context = fork_server(["launcher.training.loop"])
    folder = config.run_path.parent
    processes = []
    with claimed_port() as port:
        environments = rank_environments(n_ranks, port)
    for number, environment in enumerate(environments):
        given = (environment, folder / "run.yaml", fault, rank, folder / f"{number}.err")
        processes.append(context.Process(target=_alone, args=given, daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + seconds
    try:
        for number in sorted(range(n_ranks), key=lambda number: number == rank):
            process = processes[number]
            if number == rank and fault == "stopped":
                os.kill(process.pid, signal.SIGCONT)
            process.join(max(1.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {number} still lives"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [Ended(process.exitcode, (folder / f"{number}.err").read_text()) for number, process in enumerate(processes)]


def _alone(environment: dict[str, str], config: Path, fault: str, rank: int, stderr: Path) -> None:
    os.environ.update(environment)
    with stderr.open("w") as file:
        os.dup2(file.fileno(), 2)
    import torch

    from launcher.cli import main

    torch.set_num_threads(1)
    hang_job.plant(fault, rank, FAULT_STEP)
    sys.exit(main(["train", str(config)]))


def living_ranks() -> list[psutil.Process]:
    """The processes of ranks that are still alive: the children of the fork server."""
    server = psutil.Process(_forkserver._forkserver_pid)
    return [process for process in server.children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE]
