"""Where the relative paths of a run's saved config are read from, wherever the command is given and the run lies."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path

import pytest

from launcher.config.tree import CheckpointConfig, RunConfig
from launcher.errors import UserError
from launcher.training.run_dir import checkpoints_of, claim, enter_start_folder, start_folder


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder in which a run was started; afterwards we are elsewhere."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    claim(RunConfig(name="a", checkpoint=CheckpointConfig(dir="saved"))).close()
    claim(RunConfig(name="b", run_dir=f"{tmp_path}/far/b")).close()
    monkeypatch.chdir(tmp_path)
    return folder


def started_in(run: Path, run_dir: str = "runs/a") -> Path:
    return start_folder(run, dataclasses.replace(RunConfig(), run_dir=run_dir))


def test_the_recorded_folder_counts_where_nothing_was_moved(project, tmp_path):
    assert started_in(project / "runs/a") == started_in(Path("project/runs/a")) == project
    assert started_in(tmp_path / "far/b", f"{tmp_path}/far/b") == project


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such a name")
def test_a_folder_whose_name_is_no_text_is_recorded(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"d\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    claim(RunConfig(name="a")).close()
    monkeypatch.chdir(tmp_path)
    assert started_in(folder / "runs/a") == folder
    assert not list((folder / "runs/a").glob("*.partial"))


def test_a_link_to_the_runs_is_no_move(project, tmp_path):
    (tmp_path / "disk").mkdir()
    (project / "runs").rename(tmp_path / "disk/runs")
    (project / "runs").symlink_to(tmp_path / "disk/runs")
    assert started_in(tmp_path / "disk/runs/a") == started_in(project / "runs/a") == project


@pytest.mark.parametrize("move", [shutil.move, shutil.copytree])
def test_a_run_that_was_moved_or_copied_with_its_project_belongs_to_the_new_one(project, tmp_path, move):
    move(project, tmp_path / "new")
    assert started_in(tmp_path / "new/runs/a") == tmp_path / "new"
    assert checkpoints_of(tmp_path / "new/runs/a") == tmp_path / "new/saved"


def test_a_run_that_was_moved_alone_is_read_from_where_it_was_started(project, tmp_path):
    shutil.move(project / "runs/a", tmp_path / "archive")
    assert started_in(tmp_path / "archive") == project
    assert checkpoints_of(tmp_path / "archive") == project / "saved"


def test_where_that_folder_is_gone_the_current_one_counts(project, tmp_path):
    shutil.move(project / "runs/a", tmp_path / "archive")
    shutil.rmtree(project)
    assert started_in(tmp_path / "archive") == tmp_path


def test_where_that_folder_is_gone_a_run_of_an_absolute_path_is_read_from_the_current_one(project, tmp_path):
    shutil.rmtree(project)
    assert started_in(tmp_path / "far/b", f"{tmp_path}/far/b") == tmp_path
    path = enter_start_folder(tmp_path / "far/b/config.yaml")
    assert (Path.cwd(), path) == (tmp_path, tmp_path / "far/b/config.yaml")


def test_training_from_a_saved_config_goes_on_in_its_run(project, tmp_path):
    path = enter_start_folder(Path("project/runs/a/config.yaml"))
    assert (Path.cwd(), path) == (project, project / "runs/a/config.yaml")


def test_a_config_of_no_run_stays_where_it_is(project, tmp_path):
    shutil.copy(project / "runs/a/config.yaml", tmp_path)
    assert enter_start_folder(Path("config.yaml")) == Path("config.yaml")
    assert Path.cwd() == tmp_path


def test_training_from_the_saved_config_of_a_run_that_was_moved_alone_asks_which_is_meant(project, tmp_path):
    shutil.move(project / "runs/a", tmp_path / "archive")
    with pytest.raises(UserError) as refused:
        enter_start_folder(Path("archive/config.yaml"))
    (line,) = refused.value.problems
    assert line.startswith(f"run_dir=runs/a must be {tmp_path}/archive, since that run's config was given")
    assert line.endswith(f"; give run_dir={tmp_path}/archive to go on there")
    assert Path.cwd() == tmp_path
    enter_start_folder(Path("archive/config.yaml"), [f"run_dir={tmp_path}/archive"])
    assert Path.cwd() == project
