"""Preparing as an array: each task does its share, and a task that was killed is started again by itself."""

import sys
from pathlib import Path

import pytest

from data.config import DataConfig, SourceConfig
from launcher.config.dump import dump_config
from launcher.config.tree import RunConfig
from launcher.slurm.profile import FOLDER
from modeling.config import ModelConfig
from slurm_cluster import wait_until

pytestmark = pytest.mark.timeout(600)


def test_an_array_prepares_what_one_process_prepares(cluster, tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(12):
        (corpus / f"{number}.txt").write_text(f"file {number} says something else than the others\n" * 400)
    data = DataConfig(sources=(SourceConfig(path="corpus/*.txt"),), shard_bytes=40_000, workers=1)
    config = RunConfig(data=data, model=ModelConfig(vocab_size=512))
    (tmp_path / "config.yaml").write_text(dump_config(config))

    exported = f"--export=ALL,PATH={Path(sys.executable).parent}:{cluster.environment['PATH']}"
    options = ["--array=0-2", "--cpus-per-task=1", f"--chdir={tmp_path}", exported]
    script = str(FOLDER / "prepare.sbatch")
    job_id = cluster.command("sbatch", "--parsable", *options, script, "config.yaml").strip()
    first = f"{job_id}_0"
    wait_until(lambda: cluster.job(first).get("JobState") == "RUNNING", 60, lambda: str(cluster.job(first)))
    cluster.command("scontrol", "requeue", first)
    tasks = [f"{job_id}_{number}" for number in range(3)]
    wait_until(
        lambda: all(cluster.job(task).get("JobState") == "COMPLETED" for task in tasks),
        400,
        lambda: "\n".join(path.read_text() for path in tmp_path.glob("*.log")),
    )
    assert cluster.job(first)["Restarts"] == "1"

    def prepared_in(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "tokens").glob("corpus*/*.[bi][id][nx]")}

    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "corpus").symlink_to(corpus)
    (alone / "config.yaml").write_text(dump_config(config))
    done = cluster.command(
        "bash", "-c", f"cd {alone} && {sys.executable} -P -m launcher prepare config.yaml", timeout=240
    )
    assert done == ""
    assert prepared_in(tmp_path) == prepared_in(alone) != {}
