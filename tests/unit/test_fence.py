"""Who may write into a run directory."""

import dataclasses
import errno
import fcntl
import json
import os

import pytest

from launcher.config.tree import CheckpointConfig, RunConfig
from launcher.errors import UserError
from launcher.guard.fence import FENCE, StaleRun, raise_fence
from launcher.training.run_dir import check_run_dir, claim, is_successor
from launcher.training.run_parts import LOCK
from launcher.training.start import check_checkpoint_dir
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


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_told_from_a_run_that_lives(tmp_path, monkeypatch, code):
    """Lustre as it is mounted by default before 2.13 has none, and NFS where its lock server does not answer."""

    def refuse(file: object, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    run_path = tmp_path / "run"
    with pytest.raises(UserError) as error:
        claim(RunConfig(run_dir=str(run_path)))
    (line,) = error.value.problems
    said = f"must be on a file system that can lock files (flock), and it says: {os.strerror(code)}; choose another"
    assert line.startswith(f"run_dir={run_path} {said} run_dir, or have it mounted with locks (Lustre: -o flock; ")


@pytest.mark.parametrize("content", [b"", b"many", b"%020d\n" % 0, None])
def test_planted_fence_that_was_changed_or_taken_away_ends_the_run(tmp_path, content):
    fence = raise_fence(tmp_path)
    (tmp_path / FENCE).unlink()
    if content is not None:
        (tmp_path / FENCE).write_bytes(content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(StaleRun, match="taken away" if content is None else "was changed"), fence.held():
        raise AssertionError("never here")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("replaced", [False, True])
def test_planted_rows_into_a_file_that_was_taken_away_end_the_run(tmp_path, request, replaced):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    request.addfinalizer(file._file.close)
    file.write({"step": 1, "loss": 1.0})
    path.unlink()
    if replaced:
        path.write_text("")
    for _ in range(2):
        with pytest.raises(StaleRun, match=r"metrics\.jsonl was taken away or replaced"):
            file.write({"step": 2, "loss": 1.0})
    assert not path.exists() or path.read_text() == ""


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
        check_run_dir(config)
        with claim(config) as second:
            assert second.fence.token == first.fence.token + 1
        monkeypatch.setenv("SLURM_JOB_ID", "72")
        with pytest.raises(UserError, match="must not be in use"):
            claim(config)


def test_a_job_that_took_over_and_has_ended_can_be_succeeded(config, tmp_path, monkeypatch):
    """The stale start, on a node that is cut off, has the lock all the while."""
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    with claim(config):
        for restarts in ("1", "2"):
            monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
            claim(config).close()
            assert json.loads((tmp_path / "run" / LOCK).read_text())["slurm_restarts"] == int(restarts)
    monkeypatch.delenv("SLURM_RESTART_COUNT")
    claim(config).close()
    assert (tmp_path / "run" / LOCK).read_text() == ""


def test_planted_lock_of_another_that_holds_nonsense_is_one_in_use(config, tmp_path):
    with claim(config):
        (tmp_path / "run" / LOCK).write_text("nonsense")
        with pytest.raises(UserError, match="must not be in use"):
            claim(config)


def test_a_run_directory_that_cannot_be_written_is_one_line(config, tmp_path):
    (tmp_path / "run" / ".fence").mkdir(parents=True)
    with pytest.raises(UserError) as refused:
        claim(config)
    (line,) = refused.value.problems
    assert f"run_dir={tmp_path}/run must be writable, and is not ({tmp_path}/run/.fence: " in line


def test_successors():
    holder = {"slurm_job": "71", "slurm_restarts": 1}
    assert is_successor({"slurm_job": "71", "slurm_restarts": 2}, holder)
    assert not is_successor({"slurm_job": "71", "slurm_restarts": 1}, holder)
    assert not is_successor({"slurm_job": "72", "slurm_restarts": 2}, holder)
    here, there = ({"slurm_job": "71", "slurm_restarts": 2, "slurm_cluster": name} for name in ("a", "b"))
    assert is_successor(here, holder | {"slurm_cluster": "a"}) and is_successor(here, holder)
    assert not is_successor(there, holder | {"slurm_cluster": "a"}), "another cluster's job of that number"
    assert not is_successor({"slurm_job": None, "slurm_restarts": 2}, {"slurm_job": None, "slurm_restarts": 0})


@pytest.mark.parametrize("location", ["memory://checkpoints", "nowhere://bucket/prefix"])
def test_a_place_that_cannot_hold_checkpoints_is_refused(config, tmp_path, location):
    with pytest.raises(UserError) as refused:
        check_checkpoint_dir(dataclasses.replace(config, checkpoint=CheckpointConfig(dir=location)))
    (line,) = refused.value.problems
    assert f"checkpoint.dir={location} must" in line and "\n" not in line
    assert list(tmp_path.iterdir()) == []
