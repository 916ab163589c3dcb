"""The tests' own cluster: it is a real Slurm, and what it breaks is broken."""

import time

from slurm_cluster import Cluster, wait_until


def node_state(cluster: Cluster, name: str) -> str:
    return cluster.command("sinfo", "-h", "-n", name, "-p", "main", "-o", "%t", check=False).strip()


def test_nodes_are_machines_of_their_own(cluster):
    script = 'echo "$(hostname) $(hostname -i | cut -d" " -f1) $(ls /proc | grep -c "^[0-9]") $CUDA_VISIBLE_DEVICES"'
    lines = cluster.command("srun", "-N4", "--gpus-per-node=2", "bash", "-c", script).splitlines()
    words = sorted(line.split() for line in lines)
    assert [name for name, *_ in words] == ["n1", "n2", "n3", "n4"]
    assert [address for _, address, *_ in words] == [cluster.address(f"n{number}") for number in range(1, 5)]
    assert all(int(processes) < 20 for _, _, processes, _ in words)
    assert [devices for *_, devices in words] == ["0,1"] * 4


def test_planted_power_cut_is_seen(cluster):
    cluster.power_off("n2")
    wait_until(lambda: node_state(cluster, "n2") in ("down*", "idle*"), 60, lambda: node_state(cluster, "n2"))
    assert cluster.command("srun", "-N3", "hostname").split().count("n2") == 0


def test_planted_cut_cable_leaves_the_processes_alive(cluster):
    cluster.cut("n3")
    try:
        assert cluster.on_node("n3", "ping", "-c1", "-W1", cluster.address("ctl")).returncode != 0
        assert cluster.on_node("n3", "hostname").stdout.strip() == "n3"
    finally:
        cluster.heal("n3")
    wait_until(
        lambda: cluster.on_node("n3", "bash", "-c", f"echo > /dev/tcp/{cluster.address('ctl')}/26000").returncode == 0,
        30,
        lambda: "the cable is not healed",
    )


def test_the_controller_comes_back_with_its_jobs(cluster):
    job_id = cluster.command("sbatch", "--parsable", "-N1", "--output=/dev/null", "--wrap", "sleep 10").strip()
    wait_until(lambda: cluster.job(job_id).get("JobState") == "RUNNING", 30, lambda: str(cluster.job(job_id)))
    saved = cluster.folder / "ctl/job_state"  # written some seconds later; a crash before that loses the job
    submitted = time.time()
    wait_until(lambda: saved.exists() and saved.stat().st_mtime > submitted, 30, lambda: "no saved state")
    cluster.kill_slurmctld()
    cluster.start_slurmctld()
    wait_until(lambda: cluster.job(job_id).get("JobState") == "COMPLETED", 60, lambda: str(cluster.job(job_id)))


def test_mending_waits_for_a_step_that_outlives_its_job(cluster, tmp_path):
    """Its daemon may drain the node as it ends (`Kill task failed`), beneath the next test. Here one by name alone."""
    daemon = tmp_path / "slurmstepd"
    cluster.on_node("n1", "bash", "-c", f"cp /bin/sleep {daemon}; setsid {daemon} 5 >/dev/null 2>&1 &")
    wait_until(lambda: cluster.on_node("n1", "pgrep", "-x", daemon.name).stdout, 5, lambda: "did not start")
    cluster.mend()
    assert cluster.on_node("n1", "pgrep", "-x", daemon.name).stdout == ""
