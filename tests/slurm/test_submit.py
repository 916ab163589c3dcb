"""`roundtable submit` on a real Slurm: the run that it starts is the run of one plain process."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from launcher.config.tree import RunConfig
from launcher.slurm.config import SlurmConfig
from launcher.slurm.profile import FOLDER
from layout_runs import run_config, run_reference, write_tokens
from parallel.config import ParallelConfig
from slurm_runs import Run

CPU_NODES = SlurmConfig(nodes=4, gpus_per_node=0, tasks_per_node=2, time_minutes=30, notice_seconds=60, preflight=False)

EVERY_AXIS = ParallelConfig(tp=2, pp=2, ep=2)


def small_config(folder, slurm: SlurmConfig = CPU_NODES, parallel: ParallelConfig = EVERY_AXIS) -> RunConfig:
    config = run_config(write_tokens(folder), parallel=parallel, steps=5)
    return dataclasses.replace(config, name="small", slurm=slurm)


@pytest.mark.timeout(900)
def test_four_nodes_of_two_ranks_give_the_losses_of_one_process(cluster, tmp_path):
    """fp32, SGD: sums in another order, as in test_layouts: 1e-6."""
    config = small_config(tmp_path, dataclasses.replace(CPU_NODES, options=("nice=7",)))
    run = Run(cluster, tmp_path, config)
    (job_id,) = run.submit()
    run.wait_for_state(job_id, seconds=600)
    assert cluster.job(job_id)["Nice"] == "7"
    assert run.state(job_id) == "COMPLETED", run.story()
    assert cluster.job(job_id)["NodeList"] == "n[1-4]"
    reference = run_reference(config)
    assert run.losses() == pytest.approx(reference.losses, rel=1e-6)
    assert sorted(path.name for path in run.path.glob("logs/rank-*.log")) == [f"rank-{rank}.log" for rank in range(8)]


WRONG = {
    "unknown partition": (["slurm.partition=gpus"], "slurm.partition=gpus must be a partition of this cluster; try "),
    "more GPUs than a node has": (
        ["slurm.gpus_per_node=9"],
        "slurm.gpus_per_node=9 must be at most the 8 that a node of partition main has; try 8",
    ),
    "more nodes than there are": (
        ["--nodes", "5"],
        "slurm.nodes=5 must be at most the 4 nodes of partition main; try 4",
    ),
    "more spare nodes than are left": (
        ["slurm.preflight=true", "slurm.spare_nodes=1"],
        "slurm.spare_nodes=1 must be at most the 0 that slurm.nodes=4 leaves of partition main; try 0",
    ),
    "more time than allowed": (
        ["slurm.partition=short", "slurm.time_minutes=40"],
        "slurm.time_minutes=40 must be at most the 30 that partition short allows; try 30",
    ),
    "no time for a save": (
        ["slurm.time_minutes=1"],
        "slurm.time_minutes=1 must be longer than slurm.notice_seconds=60, the time to save at its end; try 61",
    ),
    "a save that takes longer than the notice": (
        ["slurm.notice_seconds=1", "model.d_model=2048", "model.n_layers=32", "model.d_ff=8192"],
        "slurm.notice_seconds=1 must be enough for a save, about ",
    ),
    "unreadable data": (
        ["data.sources=[{path: none/tokens}]", "model.vocab_size=300"],
        "data.sources[0].path='none/tokens' does not exist",
    ),
    "unknown cores": (["slurm.cpus_per_task=100"], "slurm.nodes=4: sbatch does not take the job: "),
    "unknown reservation": (
        ["slurm.options=[reservation=none]"],
        "slurm.nodes=4: sbatch does not take the job: ",
    ),
    "unshared run directory": (
        ["run_dir=/dev/shm/run"],
        "run_dir=/dev/shm/run must be on a file system that the nodes ",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_line_and_nothing_is_submitted(cluster, tmp_path, name):
    overrides, line = WRONG[name]
    run = Run(cluster, tmp_path, small_config(tmp_path, parallel=ParallelConfig()))
    before = sorted(path.name for path in tmp_path.rglob("*"))
    done = run.command("submit", "config.yaml", "train.global_batch_size=160", *overrides)
    assert done.returncode == 2
    assert done.stdout == ""
    said, *more = done.stderr.splitlines()
    assert more == []
    assert said.startswith(line)
    assert "; " in said, "a remedy"
    assert cluster.command("squeue", "-h") == ""
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_without_sbatch_it_is_said_and_nothing_is_submitted(cluster, tmp_path):
    run = Run(cluster, tmp_path, small_config(tmp_path))
    done = run.command("submit", "config.yaml", path=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "sbatch must be on the PATH, and is not; run this where Slurm is, on a login node"
    ]
    assert not run.path.exists()


def test_a_run_with_a_live_job_is_not_submitted_again_and_can_be_followed(cluster, tmp_path):
    """The job waits for a held node, so that nothing here depends on how fast it is."""
    run = Run(cluster, tmp_path, small_config(tmp_path))
    cluster.command("sbatch", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300")
    (job_id,) = run.submit()
    again = run.command("submit", "config.yaml")
    assert again.returncode == 2
    (said,) = again.stderr.splitlines()
    assert said.startswith(
        f"name=small must not be in use by a live job, and job {job_id} (PENDING) trains in runs/small"
    )

    status = run.command("status")
    assert status.stdout.splitlines()[1:] == [
        "  checkpoint: none yet",
        f"  job {job_id}: PENDING waits: Resources, 0:00 of 30:00",
    ], status.stdout + status.stderr
    by_name = json.loads(run.command("status", "small", "--json").stdout)
    assert by_name["jobs"][0]["job_id"] == job_id
    assert by_name["step"] is None

    assert run.command("logs", "small").stderr.startswith("runs/small/logs holds no log of rank 0: ")
    assert run.command("cancel", "runs/small").stdout == f"job {job_id}: cancelled\n"
    run.wait_for_state(job_id)
    assert run.state(job_id) == "CANCELLED"
    (said,) = run.command("cancel", "small").stderr.splitlines()
    assert said.startswith("runs/small has no queued or running job to cancel")


def test_a_dry_run_submits_nothing(cluster, tmp_path):
    run = Run(cluster, tmp_path, small_config(tmp_path))
    done = run.command("submit", "config.yaml", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("#!/bin/bash\n")
    assert cluster.command("squeue", "-h") == ""
    assert not run.path.exists()


@pytest.mark.timeout(900)
def test_the_script_can_be_submitted_by_hand(cluster, tmp_path):
    config = small_config(tmp_path, dataclasses.replace(CPU_NODES, nodes=2), ParallelConfig())
    run = Run(cluster, tmp_path, config)
    script = FOLDER / "train.sbatch"
    options = ["--job-name=small", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--chdir", str(tmp_path)]
    exported = f"--export=ALL,WANDB_MODE=disabled,PATH={Path(sys.executable).parent}:{cluster.environment['PATH']}"
    job_id = cluster.command(
        "sbatch", "--parsable", *options, exported, str(script), "config.yaml", "train.steps=3"
    ).strip()
    run.wait_for_state(job_id, seconds=600)
    assert run.state(job_id) == "COMPLETED", run.story()
    assert run.steps() == [1, 2, 3]
    (kept,) = run.path.glob("preflight/*.json")
    verdicts = json.loads(kept.read_text())["verdicts"]
    assert [(each["node"], each["state"]) for each in verdicts] == [("n1", "ok"), ("n2", "ok")]
    shown = run.command("logs", "small", "--lines", "5", "-f")
    assert len(shown.stdout.splitlines()) <= 5
