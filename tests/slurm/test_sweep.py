"""A sweep on a real Slurm: its runs are tasks of one job array, and each lives as a run of its own."""

import dataclasses
import json
from pathlib import Path

import pytest

from launcher.config.tree import CheckpointConfig
from launcher.slurm.config import SlurmConfig
from launcher.training.start import start_training
from launcher.watch.metrics import read_metrics
from layout_runs import run_config, write_tokens
from modeling.optimizers.config import AdamWConfig
from slurm_cluster import wait_until
from slurm_runs import Run

ONE_NODE = SlurmConfig(nodes=1, gpus_per_node=0, tasks_per_node=1, time_minutes=30, notice_seconds=60, preflight=False)
SWEEP = """\
grid: {optimizer.lr: [1e-3], train.steps: [6, 30]}
runs:
  - {name: last, optimizer.lr: 1e-2, seed: 1}
at_once: 2
"""
SHORT, LONG, LAST = "lr=0.001,steps=6", "lr=0.001,steps=30", "last"
STEPS = {SHORT: 6, LONG: 30, LAST: 40}  # by run, in the order of the tasks
AT = 12


class SweepRun(Run):
    """One run of a sweep."""

    def __init__(self, sweep: Run, name: str) -> None:
        self.cluster, self.folder, self.wandb_mode = sweep.cluster, sweep.folder, sweep.wandb_mode
        self.path = sweep.path / name


@pytest.fixture
def sweep(cluster, tmp_path) -> Run:
    """The folder that the sweep is submitted from; its base trains 40 steps in one process."""
    config = run_config(write_tokens(tmp_path), optimizer=AdamWConfig(lr=1.0), steps=STEPS[LAST])
    checkpoint = CheckpointConfig(every_steps=5)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return Run(cluster, tmp_path, dataclasses.replace(config, name="swept", checkpoint=checkpoint, slurm=ONE_NODE))


def submit(sweep: Run) -> list[str]:
    """Submits it; returns the tasks' job ids."""
    (job_id,) = sweep.submit("--sweep", "sweep.yaml")
    return [f"{job_id}_{task}" for task in range(len(STEPS))]


def test_the_runs_of_a_sweep_are_followed_and_cancelled_one_by_one_and_together(sweep, cluster):
    """All nodes are held, so that nothing here depends on how fast it is."""
    cluster.command("sbatch", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 300")
    wrong = sweep.command("submit", "config.yaml", "--sweep", "sweep.yaml", "slurm.partition=gpus", "train.steps=0")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert [line.partition("=")[0] for line in wrong.stderr.splitlines()] == ["last: train.steps"]
    assert not sweep.path.exists()

    tasks = submit(sweep)
    again = sweep.command("submit", "config.yaml", "--sweep", "sweep.yaml")
    (said,) = again.stderr.splitlines()
    assert said.startswith(f"name=swept must not be in use by a live job, and job {tasks[0]} (PENDING) trains in runs/")
    shown = json.loads(sweep.command("status", "swept", "--json").stdout)
    assert [(Path(run["run_dir"]).name, run["jobs"][0]["job_id"]) for run in shown] == list(
        zip(STEPS, tasks, strict=True)
    )
    assert [len(run["jobs"]) for run in shown] == [1, 1, 1]
    assert sweep.command("cancel", f"swept/{LONG}").stdout == f"job {tasks[1]}: cancelled\n"
    everywhere = sweep.command("status").stdout.splitlines()
    assert [line for line in everywhere if line.endswith(": no step yet")] == [
        f"{sweep.path}/{name}: no step yet" for name in (SHORT, LAST)
    ]
    assert sorted(sweep.command("cancel", "swept").stdout.splitlines()) == [
        f"job {task}: cancelled" for task in (tasks[0], tasks[2])
    ]


@pytest.mark.timeout(900)
def test_each_run_of_a_sweep_ends_as_it_would_by_itself(sweep, cluster, tmp_path, monkeypatch):
    """The last task is told that its time is near, and queues itself again, and nobody else.

    Its job number is that of the whole array. Another one is held until then, so that it surely lives.
    """
    tasks = submit(sweep)
    short, long, last = runs = [SweepRun(sweep, name) for name in STEPS]
    assert sweep.state(tasks[2]) == "PENDING", "two at once"
    long.wait_for_step(1)
    hold(sweep, tasks[1], LONG, "STOP")
    last.wait_for_step(AT)
    assert short.state(tasks[0]) == "COMPLETED", short.story()
    assert cluster.job(tasks[2])["JobId"] == tasks[2].partition("_")[0]
    cluster.command("scancel", "--batch", "--signal=USR1", tasks[2])
    last.wait_for_step(STEPS[LAST])
    hold(sweep, tasks[1], LONG, "CONT")
    for run, task in zip(runs, tasks, strict=True):
        run.wait_for_state(task, seconds=400)
        assert run.state(task) == "COMPLETED", run.story()
    assert [cluster.job(task)["Restarts"] for task in tasks] == ["0", "0", "1"]
    assert [row["slurm_job"] for run in runs for row in run.rows() if row.get("event") == "start"] == [*tasks, tasks[2]]
    assert "the run is complete" in sweep.command("logs", f"swept/{LAST}", "--job").stdout

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, run in zip(STEPS, runs, strict=True):
        alone = tmp_path / "alone" / name
        overrides = [f"run_dir={alone}", "metrics.wandb.mode=disabled"]
        assert start_training(run.path / "slurm/config.yaml", overrides, 1) == 0
        assert run.losses() == [row["loss"] for row in read_metrics(alone / "metrics.jsonl") if "loss" in row]
        assert run.steps() == list(range(1, STEPS[name] + 1))


def hold(sweep: Run, task: str, name: str, signal: str) -> None:
    """Stops a run's process, or lets it go on."""
    node = sweep.cluster.job(task)["NodeList"]
    sweep.cluster.on_node(node, "pkill", f"-{signal}", "-f", f"launcher train runs/swept/{name}/")


def test_planted_requeue_by_the_last_tasks_number_queues_all_tasks(cluster):
    """Why the job script says 12_3 and not SLURM_JOB_ID."""
    job_id = cluster.command("sbatch", "--parsable", "--array=0-1", "--output=/dev/null", "--wrap", "sleep 300").strip()
    tasks = [f"{job_id}_0", f"{job_id}_1"]
    for restarts, number in ((0, job_id), (1, tasks[1])):
        wait_until(lambda: [cluster.job(task).get("JobState") for task in tasks] == ["RUNNING"] * 2, 60, cluster.logs)
        assert [cluster.job(task)["Restarts"] for task in tasks] == [str(restarts)] * 2
        assert cluster.job(tasks[1])["JobId"] == job_id
        cluster.command("scontrol", "requeue", number)
    wait_until(lambda: cluster.job(tasks[1]).get("Restarts") == "2", 60, cluster.logs)
    assert cluster.job(tasks[0])["Restarts"] == "1"
