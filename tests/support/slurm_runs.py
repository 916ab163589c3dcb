"""Small runs on the tests' Slurm cluster, submitted and followed by the commands that a user types."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from launcher.watch.metrics import read_metrics
from slurm_cluster import Cluster, wait_until

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")


class Run:
    """A run in a folder of its own, submitted to the cluster."""

    def __init__(self, cluster: Cluster, folder: Path, config: RunConfig, *, wandb_mode: str = "disabled") -> None:
        self.cluster, self.folder, self.config, self.wandb_mode = cluster, folder, config, wandb_mode
        self.path = folder / config.run_path
        folder.mkdir(exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(config))

    def command(self, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs one `roundtable` command on the login host; ``path`` replaces PATH."""
        environment = self.cluster.environment | {"OMP_NUM_THREADS": "1", "WANDB_MODE": self.wandb_mode}
        return subprocess.run(
            [sys.executable, "-P", "-m", "launcher", *arguments],
            cwd=self.folder,
            env=environment if path is None else environment | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )

    def submit(self, *arguments: str) -> list[str]:
        """Submits the run; returns the job ids."""
        done = self.command("submit", "config.yaml", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[0].removeprefix("job ").partition(":")[0].split(", ")

    def state(self, job_id: str) -> str:
        """The job's state; "" while slurmctld does not answer."""
        return self.cluster.job(job_id).get("JobState", "")

    def wait_for_state(self, job_id: str, *states: str, seconds: float = 300) -> float:
        """Waits until the job is in one of ``states`` (none given: any final state); returns the seconds waited."""
        return wait_until(lambda: self.state(job_id) in (states or ENDED), seconds, self.story)

    def wait_for_step(self, step: int, seconds: float = 300) -> float:
        """Waits until the update ``step`` is in metrics.jsonl; returns the seconds waited."""
        return wait_until(lambda: self.steps()[-1:] >= [step], seconds, self.story)

    def wait_for_checkpoint(self, step: int, seconds: float = 300) -> float:
        """Waits until there is a checkpoint of that step or a later one; returns the seconds waited."""
        return wait_until(lambda: self.newest_checkpoint() >= step, seconds, self.story)

    def newest_checkpoint(self) -> int:
        """The newest committed checkpoint's step; -1 where there is none."""
        return max((int(each.name[5:]) for each in self.path.glob("checkpoints/step-*[0-9]")), default=-1)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; empty where it does not exist yet."""
        path = self.path / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def steps(self) -> list[int]:
        """The steps of the updates in metrics.jsonl."""
        return [row["step"] for row in self.rows() if "loss" in row]

    def losses(self) -> list[float]:
        """The losses of the updates in metrics.jsonl."""
        return [row["loss"] for row in self.rows() if "loss" in row]

    def n_resumes(self) -> int:
        """The number of times that the run resumed from a checkpoint, as recorded in metrics.jsonl."""
        return sum(row.get("event") == "resume" for row in self.rows())

    def story(self) -> str:
        """The ends of all logs, the queue and the run's progress, for the message of a failed test."""
        told = [f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.path.glob("logs/*.log"))]
        queue = self.cluster.command("squeue", check=False) + self.cluster.command("sinfo", "-p", "main", check=False)
        return "\n".join([*told, queue, f"steps {self.steps()[-3:]}, checkpoint {self.newest_checkpoint()}"])
