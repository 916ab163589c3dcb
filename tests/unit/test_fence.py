"""Who may write into a run directory."""

import dataclasses
import json

import pytest

from launcher.config.tree import CheckpointConfig, RunConfig
from launcher.errors import UserError
from launcher.fence import StaleRun, raise_fence
from launcher.run_dir import LOCK, check_free, claim, is_successor
from launcher.start import check_checkpoint_dir
from launcher.watch.metrics import MetricsFile


def test_each_start_shuts_out_the_one_before(tmp_path):
    first = raise_fence(tmp_path)
    with first.held():
        pass
    second = raise_fence(tmp_path)
    assert (first.token, second.token) == (1, 2)
    with pytest.raises(StaleRun, match="start 2"), first.held():
        raise AssertionError("never here")
    with second.held():
        pass


def test_planted_stale_writer_leaves_the_metrics_as_they_are(tmp_path):
    stale = MetricsFile.resume(tmp_path / "metrics.jsonl", 0, raise_fence(tmp_path).held)
    stale.write({"step": 1, "loss": 1.0})
    latest = raise_fence(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with stale, pytest.raises(StaleRun):
        stale.write({"step": 2, "loss": 1.0})
    with pytest.raises(StaleRun):
        MetricsFile.resume(tmp_path / "metrics.jsonl", 0, stale._guard)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    with MetricsFile.resume(tmp_path / "metrics.jsonl", 1, latest.held) as rightful:
        rightful.write({"step": 2, "loss": 1.0})


@pytest.fixture
def config(tmp_path) -> RunConfig:
    return dataclasses.replace(RunConfig(), run_dir=str(tmp_path / "run"))


def test_a_requeued_job_takes_over_and_nobody_else_does(config, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    with claim(config) as first:
        assert json.loads((tmp_path / "run" / LOCK).read_text())["slurm_job"] == "71"
        with pytest.raises(UserError, match="must not be in use"):
            claim(config)
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        check_free(config)
        with claim(config) as second:
            assert second.fence.token == first.fence.token + 1
        monkeypatch.setenv("SLURM_JOB_ID", "72")
        with pytest.raises(UserError, match="must not be in use"):
            claim(config)


def test_successors():
    holder = {"slurm_job": "71", "slurm_restarts": 1}
    assert is_successor({"slurm_job": "71", "slurm_restarts": 2}, holder)
    assert not is_successor({"slurm_job": "71", "slurm_restarts": 1}, holder)
    assert not is_successor({"slurm_job": "72", "slurm_restarts": 2}, holder)
    assert not is_successor({"slurm_job": None, "slurm_restarts": 2}, {"slurm_job": None, "slurm_restarts": 0})


@pytest.mark.parametrize("location", ["memory://checkpoints", "nowhere://bucket/prefix"])
def test_a_place_that_cannot_hold_checkpoints_is_refused(config, tmp_path, location):
    with pytest.raises(UserError) as refused:
        check_checkpoint_dir(dataclasses.replace(config, checkpoint=CheckpointConfig(dir=location)))
    (line,) = refused.value.problems
    assert f"checkpoint.dir={location} must" in line and "\n" not in line
    assert list(tmp_path.iterdir()) == []
