"""What ends a job, and how the run goes on: in every case it is COMPLETED with the losses of an uninterrupted run."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from launcher.config.load import load_config
from launcher.config.tree import CheckpointConfig, HealthConfig, RunConfig
from launcher.guard.agreement import commit, hash_of_code, hash_of_config
from launcher.slurm.config import SlurmConfig
from launcher.training.health import UNHEALTHY
from launcher.watch.wandb_read import read_history, read_records, wandb_files
from launcher.watch.wandb_run import saved_run_id
from layout_runs import run_config, write_tokens
from modeling.optimizers.config import AdamWConfig, SGDConfig
from orphans import ORPHAN_SECONDS
from slurm_cluster import Cluster, wait_until
from slurm_runs import Run

STEPS, EVERY, AT = 80, 10, 25
TWO_NODES = SlurmConfig(nodes=2, gpus_per_node=0, tasks_per_node=1, time_minutes=60, notice_seconds=60, preflight=False)
pytestmark = pytest.mark.timeout(900)


def life_config(folder: Path, **slurm) -> RunConfig:
    """80 steps on two nodes, a checkpoint every 10; a hung collective ends a rank after 40 s."""
    config = run_config(
        write_tokens(folder), optimizer=AdamWConfig(lr=1e-3), steps=STEPS, micro_batch_size=4, timeout_seconds=40
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


def go_through(run: Run, fault: Callable[[], object], *, at_step: int = AT, seconds: float = 400) -> Recovery:
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


def nodes_of(run: Run, job_id: str) -> list[str]:
    """Where the job ran last."""
    return run.cluster.command("scontrol", "show", "hostnames", run.cluster.job(job_id)["NodeList"]).split()


def test_a_killed_rank_is_started_again_in_the_same_job(cluster, tmp_path, uninterrupted):
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit()
    recovery = go_through(run, lambda: cluster.on_node("n2", "pkill", "-9", "-f", "launcher train"))
    finish(run, job_id, uninterrupted, "rank killed", recovery)
    assert cluster.job(job_id)["Restarts"] == "0"
    assert recovery.repeated < EVERY


def test_a_killed_step_daemon_leaves_no_rank(cluster, tmp_path, uninterrupted):
    """A task that its slurmstepd no longer sees would train on; one that is stopped would wait for ever."""
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit()

    def ranks() -> str:
        return cluster.on_node("n2", "bash", "-c", "pgrep -f 'launcher [t]rain' || true").stdout

    def kill() -> None:
        assert ranks()
        cluster.on_node("n2", "pkill", "-STOP", "-f", "launcher train")
        cluster.on_node("n2", "pkill", "-9", "slurmstepd")
        wait_until(lambda: not ranks(), ORPHAN_SECONDS, lambda: f"left on n2: {ranks()}")

    recovery = go_through(run, kill)
    finish(run, job_id, uninterrupted, "step daemon killed", recovery)


def test_a_stopped_rank_is_ended_and_started_again(cluster, tmp_path, uninterrupted):
    """SIGSTOP: the others wait 40 s, then their collective fails; srun kills the stopped one."""
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit()
    recovery = go_through(run, lambda: cluster.on_node("n2", "pkill", "-STOP", "-f", "launcher train"))
    finish(run, job_id, uninterrupted, "rank stopped (SIGSTOP)", recovery)


def test_a_job_that_is_requeued_by_hand_goes_on(cluster, tmp_path, uninterrupted):
    run = Run(cluster, tmp_path, life_config(tmp_path), wandb_mode="offline")
    (job_id,) = run.submit()
    recovery = go_through(run, lambda: cluster.command("scontrol", "requeue", job_id))
    finish(run, job_id, uninterrupted, "scontrol requeue", recovery)
    assert cluster.job(job_id)["Restarts"] == "1"
    assert_each_start_is_recorded(run, job_id)


def assert_each_start_is_recorded(run: Run, job_id: str) -> None:
    """By an event in metrics.jsonl, and in W&B by config and history, under one id for both starts."""
    events = [row for row in run.rows() if row.get("event") == "start"]
    config = load_config(run.path / "config.yaml")
    code = {"commit": commit(), "code_sha256": hash_of_code()[:12], "config_sha256": hash_of_config(config)[:12]}
    assert [(row["slurm_job"], row["slurm_restarts"], row["ranks"]) for row in events] == [
        (job_id, 0, 2),
        (job_id, 1, 2),
    ]
    assert [row["nodes"] for row in events] == ["n[1-2]"] * 2
    assert all({key: row[key] for key in code} == code for row in events)
    for path, event in zip(wandb_files(run.path), events, strict=True):
        logged = next(r.run for r in read_records(path) if r.WhichOneof("record_type") == "run")
        assert logged.run_id == saved_run_id(run.path)
        kept = {item.key: json.loads(item.value_json) for item in logged.config.update}
        assert {"step": event["step"], "event": "start", **kept["start"]} == event
        assert kept["train"]["steps"] == STEPS
        assert event in read_history(path)


@pytest.mark.parametrize("warned", ["batch", "ranks"])
def test_preemption_saves_and_goes_on(cluster, tmp_path, uninterrupted, warned):
    """The batch script is warned where the site has it so; otherwise the ranks alone are, and exit with 75."""
    cluster.reconfigure(warn_batch_of_preemption=warned == "batch")
    try:
        run = Run(cluster, tmp_path, life_config(tmp_path))
        (job_id,) = run.submit()
        high = ["sbatch", "-p", "high", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 5"]
        recovery = go_through(run, lambda: cluster.command(*high))
        finish(run, job_id, uninterrupted, f"preemption, {warned} warned", recovery)
        assert recovery.repeated == 0
    finally:
        cluster.reconfigure(warn_batch_of_preemption=True)


def test_losing_a_worker_node_to_a_power_cut(cluster, tmp_path, uninterrupted):
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit()
    recovery = go_through(run, lambda: cluster.power_off("n2"))
    finish(run, job_id, uninterrupted, "power cut, worker node", recovery)
    assert "n2" not in nodes_of(run, job_id)
    assert recovery.repeated < EVERY


def test_a_node_that_breaks_under_the_run_is_replaced_by_a_spare_one(cluster, tmp_path, uninterrupted):
    """Its cable has become slow when one of its ranks dies: the next start measures all nodes, and leaves it out."""
    run = Run(cluster, tmp_path, life_config(tmp_path, preflight=True, spare_nodes=1))
    (job_id,) = run.submit()

    def fault() -> None:
        cluster.slow("n2")
        cluster.on_node("n2", "pkill", "-9", "-f", "launcher train")

    recovery = go_through(run, fault)
    finish(run, job_id, uninterrupted, "rank killed on a node that has become slow", recovery)
    assert cluster.job(job_id)["Restarts"] == "0"
    log = (run.path / f"logs/job-{job_id}.log").read_text()
    assert "trains on n1 n2\n" in log and "trains on n1 n3, without n2\n" in log, log
    assert recovery.repeated < EVERY


def test_losing_the_head_node_to_a_power_cut(cluster, tmp_path, uninterrupted):
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit()
    recovery = go_through(run, lambda: cluster.power_off("n1"))
    finish(run, job_id, uninterrupted, "power cut, head node", recovery)
    assert "n1" not in nodes_of(run, job_id)
    assert recovery.repeated < EVERY


def test_a_worker_whose_cable_is_cut_and_healed(cluster, tmp_path, uninterrupted):
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit()
    recovery = go_through(run, lambda: cluster.cut("n2"))
    cluster.heal("n2")
    finish(run, job_id, uninterrupted, "cable cut, worker node", recovery)
    assert recovery.repeated < EVERY


def test_a_killed_slurmd_is_a_lost_node(cluster, tmp_path, uninterrupted):
    """Though its rank lives on, Slurm takes the node for lost after some 18 s; until then the test holds the ranks."""

    def fault() -> None:
        cluster.kill_slurmd("n2")
        signal_ranks(cluster, "STOP")

    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit("train.timeout_seconds=120")
    recovery = go_through(run, fault)
    finish(run, job_id, uninterrupted, "slurmd killed", recovery)
    assert "n2" not in nodes_of(run, job_id)


def test_a_restarted_slurmctld_disturbs_nobody(cluster, tmp_path, uninterrupted):
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit()
    run.wait_for_step(AT)
    cluster.kill_slurmctld()
    run.wait_for_step(40)
    cluster.start_slurmctld()
    finish(run, job_id, uninterrupted, "slurmctld restarted")
    assert run.n_resumes() == 0


def test_cancel_with_a_save_ends_the_job_after_a_checkpoint(cluster, tmp_path):
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit()
    run.wait_for_step(AT)
    done = run.command("cancel", "life", "--save")
    assert done.returncode == 0, done.stderr
    run.wait_for_state(job_id)
    assert run.state(job_id) == "CANCELLED", run.story()
    assert run.newest_checkpoint() == run.steps()[-1] >= AT
    assert cluster.job(job_id)["Restarts"] == "0"


def test_a_second_cancel_with_a_save_lets_the_first_one_save(cluster, tmp_path):
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit()
    run.wait_for_step(AT)
    signal_ranks(cluster, "STOP", ["n2"])  # so that rank 0 waits, and hears both requests within one step
    assert run.command("cancel", "life", "--save").returncode == 0
    time.sleep(2)
    assert run.command("cancel", "life", "--save").returncode == 0
    time.sleep(2)
    signal_ranks(cluster, "CONT", ["n2"])
    run.wait_for_state(job_id)
    assert run.state(job_id) == "CANCELLED", run.story()
    assert run.newest_checkpoint() == run.steps()[-1] >= AT, run.story()


def test_a_run_that_health_stops_is_not_started_again(cluster, tmp_path):
    """The same start would meet the same batch: the job fails with health's exit code, after one start."""
    sick = dataclasses.replace(
        life_config(tmp_path),
        optimizer=SGDConfig(lr=1e30, clip_norm=None),
        health=HealthConfig(on_nonfinite="stop"),
    )
    run = Run(cluster, tmp_path, sick)
    (job_id,) = run.submit()
    run.wait_for_state(job_id)
    assert run.state(job_id) == "FAILED", run.story()
    assert cluster.job(job_id)["ExitCode"] == f"{UNHEALTHY}:0", run.story()
    assert sum(row.get("event") == "start" for row in run.rows()) == 1, run.story()


def reach_the_notice(run: Run, job_id: str) -> None:
    """Moves the job's time limit so near that the notice is due, and holds the ranks until Slurm has looked.

    Slurm looks twice a minute, which is longer than these runs take.
    """
    signal_ranks(run.cluster, "STOP")
    minutes, seconds = run.cluster.job(job_id)["RunTime"].split(":")[1:]
    run.cluster.command("scontrol", "update", f"JobId={job_id}", f"TimeLimit={int(minutes) + 1 + (int(seconds) > 25)}")
    time.sleep(35)
    signal_ranks(run.cluster, "CONT")


def signal_ranks(cluster: Cluster, name: str, nodes: Sequence[str] = ("n1", "n2")) -> None:
    for node in nodes:
        cluster.on_node(node, "pkill", f"-{name}", "-f", "launcher train")


def test_a_run_goes_past_the_time_limit(cluster, tmp_path, uninterrupted):
    run = Run(cluster, tmp_path, life_config(tmp_path))
    (job_id,) = run.submit("train.timeout_seconds=120")
    recovery = go_through(run, lambda: reach_the_notice(run, job_id))
    finish(run, job_id, uninterrupted, "time limit", recovery)
    assert int(cluster.job(job_id)["Restarts"]) >= 1  # a slow machine comes to the moved limit once more
    assert recovery.repeated == 0


def test_a_chain_of_jobs_where_none_may_be_requeued(cluster, tmp_path, uninterrupted):
    run = Run(cluster, tmp_path, life_config(tmp_path))
    first, second = run.submit("train.timeout_seconds=120", "--no-requeue", "--chain", "2")
    run.wait_for_step(AT)
    assert run.state(second) == "PENDING"
    reach_the_notice(run, first)
    finish(run, second, uninterrupted, "chain")
    assert (run.state(first), cluster.job(first)["ExitCode"]) == ("FAILED", "75:0"), "stopped, after saving"


def test_the_next_job_of_a_chain_takes_over_from_one_whose_nodes_are_lost(cluster, tmp_path, uninterrupted):
    """One loses its power; the head its cable for a while, so that rank 0 lives on, with the run directory's lock."""

    def fault() -> None:
        cluster.on_node("n1", "pkill", "-STOP", "-f", "launcher train")
        cluster.cut("n1")
        cluster.power_off("n2")

    run = Run(cluster, tmp_path, life_config(tmp_path))
    first, second = run.submit("train.timeout_seconds=300", "--no-requeue", "--chain", "2")
    recovery = go_through(run, fault)
    assert cluster.on_node("n1", "pgrep", "-f", "launcher train").stdout, "the stale rank lives"
    cluster.heal("n1")
    finish(run, second, uninterrupted, "chain, both nodes of the first job lost", recovery)
    assert run.state(first) == "NODE_FAIL"
    assert nodes_of(run, second) == ["n3", "n4"]
    assert recovery.repeated < 2 * EVERY, "the checkpoint of step 30 may have been under way"


def test_planted_split_brain_commits_nothing(cluster, tmp_path, uninterrupted):
    """A node that Slurm cannot reach goes on training, unheard, and finds its run started again elsewhere.

    Its ranks are held until the successor has begun, so that they surely come back after it.
    """

    def fault() -> None:
        cluster.on_node("n1", "pkill", "-STOP", "-f", "launcher train")
        cluster.cut("n1")

    run = Run(cluster, tmp_path, life_config(tmp_path, nodes=1, tasks_per_node=2))
    (job_id,) = run.submit("train.timeout_seconds=300")
    recovery = go_through(run, fault)
    assert cluster.on_node("n1", "pgrep", "-f", "launcher train").stdout, "the stale ranks live"
    cluster.on_node("n1", "pkill", "-CONT", "-f", "launcher train")
    finish(run, job_id, uninterrupted, "cable cut, head node (split brain)", recovery)
    wait_until(lambda: "was started again" in (run.path / "logs/rank-0.log").read_text(), 120, run.story)
    assert run.steps() == list(range(1, STEPS + 1))
