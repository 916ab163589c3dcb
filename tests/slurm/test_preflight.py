"""The preflight of a job: a slow or broken node is named, and the run trains on the others as if it were not there."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from launcher.config.tree import RunConfig
from launcher.slurm.config import SlurmConfig
from launcher.slurm.profile import FOLDER
from layout_runs import run_config, run_reference, write_tokens
from slurm_cluster import Cluster
from slurm_runs import Run

pytestmark = pytest.mark.timeout(900)


def two_nodes(folder: Path, *, spares: int = 0) -> RunConfig:
    """Five steps on two nodes of a process each."""
    config = run_config(write_tokens(folder), steps=5)
    slurm = SlurmConfig(
        nodes=2, spare_nodes=spares, gpus_per_node=0, tasks_per_node=1, time_minutes=30, notice_seconds=60
    )
    return dataclasses.replace(config, name="checked", slurm=slurm)


def log_of(run: Run, job_id: str) -> str:
    return (run.path / f"logs/job-{job_id}.log").read_text()


def trained_on(cluster: Cluster, job_id: str) -> list[str]:
    """The nodes that were told to start ranks of the job's last step, by their own logs."""
    steps = {name: (cluster.folder / f"log/slurmd.{name}.log").read_text() for name in cluster.nodes}
    last = max(int(word.split(".")[1]) for text in steps.values() for word in text.split() if is_step(word, job_id))
    return [name for name, text in steps.items() if f"StepId={job_id}.{last} " in text]


def is_step(word: str, job_id: str) -> bool:
    return word.startswith(f"StepId={job_id}.") and word.split(".")[1].isdigit()


def check_losses(run: Run) -> None:
    """Those of one plain process; fp32, SGD: sums in another order, as in test_layouts: 1e-6."""
    assert run.losses() == pytest.approx(run_reference(run.config).losses, rel=1e-6)


def test_planted_slow_cable_is_found_and_the_spare_node_takes_its_place(cluster, tmp_path):
    cluster.slow("n2")
    run = Run(cluster, tmp_path, two_nodes(tmp_path, spares=1))
    (job_id,) = run.submit()
    run.wait_for_state(job_id)
    assert run.state(job_id) == "COMPLETED", run.story()
    log = log_of(run, job_id)
    assert "n2 is slow: all-reduce with each of 2 partners at most 0.00" in log, log
    assert "trains on n1 n3, without n2" in log
    assert trained_on(cluster, job_id) == ["n1", "n3"]
    check_losses(run)

    options = ["--nodes=3", "--ntasks-per-node=1", "--gpus-per-node=0", "--chdir", str(tmp_path), "--output=log"]
    exported = f"--export=ALL,PYTHON={sys.executable}"
    by_hand = cluster.command(
        "sbatch", "--parsable", *options, exported, str(FOLDER / "preflight.sbatch"), "config.yaml", "--json"
    ).strip()
    run.wait_for_state(by_hand)
    text = (tmp_path / "log").read_text()
    assert (run.state(by_hand), cluster.job(by_hand)["ExitCode"]) == ("FAILED", "1:0"), text
    assert json.loads(text[text.index("{") : text.rindex("}") + 1])["bad_nodes"] == ["n2"]


def test_planted_disk_that_is_not_shared_sends_the_job_to_other_nodes(cluster, tmp_path):
    run = Run(cluster, tmp_path, two_nodes(tmp_path))
    run.path.mkdir(parents=True)
    cluster.on_node("n2", "mount", "-t", "tmpfs", "none", str(run.path))
    try:
        (job_id,) = run.submit()
        run.wait_for_state(job_id)
    finally:
        cluster.on_node("n2", "umount", str(run.path))
    assert run.state(job_id) == "COMPLETED", run.story()
    log = log_of(run, job_id)
    assert "n2 is broken: rank 1: runs/checked/slurm/config.yaml: no such file" in log, log
    assert (cluster.job(job_id)["Restarts"], cluster.job(job_id)["ExcNodeList"]) == ("1", "n2")
    assert "n2" not in trained_on(cluster, job_id)
    check_losses(run)


def test_planted_first_node_without_python_is_left_out(cluster, tmp_path):
    """The first node leads, so nobody can give a verdict on it but its silence."""
    run = Run(cluster, tmp_path, two_nodes(tmp_path, spares=1))
    python = str(Path(sys.executable).resolve())
    cluster.on_node("n1", "mount", "--bind", "/dev/null", python)
    try:
        (job_id,) = run.submit()
        run.wait_for_state(job_id)
    finally:
        cluster.on_node("n1", "umount", python)
    assert run.state(job_id) == "COMPLETED", run.story()
    log = log_of(run, job_id)
    assert "no verdict on n1 n2 n3: without n1, once more" in log
    assert trained_on(cluster, job_id) == ["n2", "n3"]
    check_losses(run)
