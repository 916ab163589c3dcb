"""What ends a job, and how the run goes on: in every case it is COMPLETED with the losses of an uninterrupted run."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.config.tree import CheckpointConfig, RunConfig
from launcher.slurm.config import SlurmConfig
from layout_runs import run_config, write_tokens
from modeling.optimizers.config import AdamWConfig
from slurm_cluster import Cluster, wait_until
from slurm_runs import Run

STEPS, EVERY = 240, 20
TWO_NODES = SlurmConfig(nodes=2, gpus_per_node=0, tasks_per_node=1, time_minutes=60, notice_seconds=60)
pytestmark = pytest.mark.timeout(900)


def life_config(folder: Path, **slurm) -> RunConfig:
    """240 steps on two nodes, a checkpoint every 20; a hung collective ends a rank after 40 s."""
    config = run_config(
        write_tokens(folder), optimizer=AdamWConfig(lr=1e-3), steps=STEPS, global_batch_size=16, timeout_seconds=40
    )
    return dataclasses.replace(
        config,
        name="life",
        checkpoint=CheckpointConfig(every_steps=EVERY),
        slurm=dataclasses.replace(TWO_NODES, **slurm),
    )


@pytest.fixture(scope="session")
def uninterrupted(running_cluster, tmp_path_factory) -> list[float]:
    """The losses of the run that nobody disturbs, on two local processes."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run = Run(running_cluster, folder, life_config(folder))
    done = run.command("train", "config.yaml", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert len(run.losses()) == STEPS
    return run.losses()


@dataclasses.dataclass
class Recovery:
    """How a run came through: seconds from the fault to a new step, and the steps that were trained twice."""

    seconds: float
    repeated: int


def go_through(run: Run, fault: Callable[[], object], *, at_step: int = 50, seconds: float = 400) -> Recovery:
    """Lets the run come to a step, does the fault, and waits until it trains new steps after a restart."""
    run.wait_for_step(at_step)
    resumes = run.n_resumes()
    fault()
    started, highest = time.monotonic(), 0

    def has_resumed() -> bool:
        nonlocal highest
        if run.n_resumes() > resumes:
            return True
        highest = max([highest, *run.steps()[-1:]])
        return False

    wait_until(has_resumed, seconds, run.story)
    resumed_at = [row["step"] for row in run.rows() if row.get("event") == "resume"][-1]
    run.wait_for_step(highest + 1)
    return Recovery(round(time.monotonic() - started, 1), highest - resumed_at)


def finish(run: Run, job_id: str, losses: list[float], what: str, recovery: Recovery | None = None) -> None:
    """The job is COMPLETED, every step was trained once in order, and the losses are those, bit for bit."""
    run.wait_for_state(job_id, seconds=400)
    assert run.state(job_id) == "COMPLETED", run.story()
    assert run.steps() == list(range(1, STEPS + 1))
    assert run.losses() == losses
    if recovery is not None:
        print(f"\n{what}: {recovery.seconds} s to a new step, {recovery.repeated} steps repeated")


def pids_of_rank(cluster: Cluster, node: str) -> list[str]:
    return cluster.on_node(node, "pgrep", "-f", "launcher train").stdout.split()


def test_a_killed_rank_is_started_again_in_the_same_job(cluster, tmp_path, uninterrupted):
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit()
    recovery = go_through(run, lambda: cluster.on_node("n2", "pkill", "-9", "-f", "launcher train"))
    finish(run, job_id, uninterrupted, "rank killed", recovery)
    assert cluster.job(job_id)["Restarts"] == "0"
    assert recovery.repeated < EVERY
