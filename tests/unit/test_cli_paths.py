"""Odd paths on the command line, and damaged runs in the queue: told in a line, and the rest goes on."""

import json
import os
import re
import resource
import shlex
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from data.config import DataConfig, SourceConfig
from data.places import why_not_writable
from hostile_sweep import sweep
from launcher.cli import main
from launcher.config.tree import RunConfig
from launcher.errors import UserError
from launcher.report.at_end import write_at_end
from launcher.slurm.checks import check_unused
from launcher.slurm.queue import LiveJob, live_jobs
from launcher.training.run_parts import STARTED_IN
from launcher.training.start import check_prepared
from launcher.watch.picture import ENDINGS
from sealed import write_run

COMMANDS = {
    "eval": ("CHECKPOINT", []),
    "export": ("CHECKPOINT", ["out"]),
    "generate": ("CHECKPOINT", ["--prompt", "x"]),
    "inspect": ("CHECKPOINT", ["--text", "x"]),
    "checkpoint show": ("DIR", []),
    "checkpoint verify": ("DIR", []),
}


@pytest.mark.parametrize("path", ["x" * 300, "x/" * 3000, "a\0b", "loop", "loop/x"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_that_cannot_be_is_no_folder(command, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    key, options = COMMANDS[command]
    assert main([*command.split(), path, *options]) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith(f"{key}={path[0]}") and "is not a folder; give a run directory" in line
    assert len(line) < 3100 and told.out == "" and [each.name for each in tmp_path.iterdir()] == ["loop"]


@pytest.mark.parametrize("command", ["export", "branch"])
def test_a_path_through_a_folder_that_is_not_there_and_back_creates_nothing(command, tmp_path, monkeypatch, capsys):
    """Made with its parents, as outputs are, it would leave that folder behind, and replace what it leads back to."""
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    options = ["--step", "1"] if command == "branch" else []
    assert main([command, "run", "absent/../there/out", *options]) == 2
    assert why_not_writable("absent/../there") == "must not lead through absent and back (..), which is no folder"
    assert why_not_writable("there/../there/new/../../x") is not None and why_not_writable("there/../x") is None
    assert [each.name for each in tmp_path.iterdir()] == ["there"]


def test_some_of_the_sweep_of_paths():
    result = sweep(slice(None, None, 31), kind="paths and arguments")
    assert result.tried.total() > 35 and result.violations == []


@pytest.fixture
def three_runs(tmp_path, monkeypatch) -> list[Path]:
    """Runs with a live job each, of which the second is damaged; Slurm is here."""
    runs = [tmp_path / name for name in ("a", "b", "c")]
    for run in runs:
        (run / "slurm").mkdir(parents=True)
    (runs[1] / "metrics.jsonl").mkdir()
    jobs = [LiveJob(str(n), "RUNNING", "None", "n1", "1:00", "2:00", run.absolute(), run) for n, run in enumerate(runs)]
    monkeypatch.setattr("launcher.slurm.follow.require", lambda *_: None)
    monkeypatch.setattr("launcher.slurm.follow.live_jobs", lambda *_: jobs)
    return runs


def test_status_names_a_damaged_run_and_lists_the_others(three_runs, capsys):
    first, damaged, last = three_runs
    assert main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        f"{first}: no step yet",
        f"{damaged}: damaged",
        f"{last}: no step yet",
    ]
    at = lines.index(f"{damaged}: damaged")
    assert lines[at + 1].startswith(f"  {damaged}/metrics.jsonl must be a file, and is a folder; move it away")
    assert lines[at + 2] == "  job 1: RUNNING on n1, 1:00 of 2:00"
    assert main(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(len(run.get("problems", [])), run["jobs"][0]["job_id"]) for run in shown] == [(0, "0"), (1, "1"), (0, "2")]
    assert main(["status", str(damaged)]) == 2, "the one that was asked for"


@pytest.mark.parametrize("named", ["runs/a", "a", "path", "runs/damaged"])
def test_a_job_whose_run_directory_is_gone_or_damaged_is_cancelled(tmp_path, monkeypatch, capsys, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/damaged").mkdir(parents=True)
    (tmp_path / "runs/damaged/slurm").touch()
    path = tmp_path / ("runs/damaged" if named == "runs/damaged" else "runs/a")
    queue = f"7|PENDING|Resources||0:00|1:00|roundtable:{path}\n8|PENDING|Resources||0:00|1:00|roundtable:/other\n"
    cancelled = []
    monkeypatch.setattr("launcher.slurm.follow.require", lambda *_: None)
    monkeypatch.setattr("launcher.slurm.queue.ask", lambda *_: queue)
    monkeypatch.setattr("launcher.slurm.follow.ask", lambda *words: cancelled.append(words))
    assert main(["cancel", str(path) if named == "path" else named]) == 0
    assert capsys.readouterr().out == "job 7: cancelled\n" and cancelled == [("scancel", "7")]
    assert main(["cancel", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("RUN=nowhere must be a run directory")


def test_a_sweep_whose_list_is_damaged_is_one_run_in_the_queue(tmp_path, monkeypatch):
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm/runs.txt").write_bytes(b"\xff\x00")
    monkeypatch.setattr("launcher.slurm.queue.ask", lambda *_: f"7_0|RUNNING||n1|0:01|1:00|roundtable:{tmp_path}\n")
    (job,) = live_jobs()
    assert (job.job_id, job.run_path) == ("7_0", tmp_path)


def test_commands_that_are_named_can_be_pasted(tmp_path, monkeypatch, capsys):
    """Of a run whose name has spaces and other signs."""
    run = tmp_path / "ünï, x=1 b"
    (run / "slurm").mkdir(parents=True)
    job = LiveJob("7", "RUNNING", "None", "n1", "1:00", "2:00", run, run)
    for module in ("checks", "follow"):
        monkeypatch.setattr(f"launcher.slurm.{module}.require", lambda *_: None)
        monkeypatch.setattr(f"launcher.slurm.{module}.live_jobs", lambda *_: [job])
    monkeypatch.setattr("launcher.slurm.follow.ask", lambda *_: "")
    assert main(["logs", str(run)]) == 2
    assert main(["cancel", str(run), "--save"]) == 0
    (run / "report.html").mkdir()
    write_at_end(run)
    said = [*capsys.readouterr()]
    config = RunConfig(name="x", run_dir=str(run))
    said += [*check_unused(config, [])]
    with pytest.raises(UserError) as refused:
        check_prepared(replace(config, data=DataConfig(sources=(SourceConfig(path=str(run)),))), run / "my config.yaml")
    said += refused.value.problems
    commands = [shlex.split(command) for command in re.findall("`(roundtable [^`]*)`", "\n".join(said))]
    assert sorted(words[1] for words in commands) == ["cancel", "prepare", "report", "status", "status"]
    assert {words[2] for words in commands} == {str(run), str(run / "my config.yaml")}


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_nothing_is_writable_for_everybody_whatever_the_umask(open_umask, tmp_path):
    write_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    made = [tmp_path / "out", *(tmp_path / "out").iterdir()]
    assert len(made) > 5
    assert [path.name for path in made if path.stat().st_mode & stat.S_IWOTH] == []


@pytest.mark.parametrize("command", [["generate", "--prompt", "a"], ["export", "out"]])
def test_a_machine_without_a_temporary_folder_says_so(command, tmp_path, monkeypatch, capsys):
    directory = write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    assert main([command[0], str(directory), *command[1:]]) == 1
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith("TMPDIR=/nowhere: No usable temporary directory found in ['/nowhere']; set TMPDIR to a")
    assert told.out == "" and [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_picture_that_finds_no_room_leaves_the_one_before_it(tmp_path, capsys, ending):
    """A limit of a file's size stands for a full disk: both end a write in the middle of the picture."""
    picture = tmp_path / f"plot{ending}"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    picture.write_bytes(b"the one before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert main(["plot", str(tmp_path), "--out", str(picture)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"--out={picture} cannot be written ([Errno 27] File too large); choose another place"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", picture.name]
    assert picture.read_bytes() == b"the one before"


def test_a_name_that_the_locale_cannot_write_is_one_line(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "c.yaml").write_text("name: lauf-\u00e9\ndata: {sources: [{path: a.txt}]}\n", encoding="utf-8")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "launcher", "train", "c.yaml", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    rule = rb"must be letters that this locale's encoding \(ascii\) knows, as all are under LC_ALL=C.UTF-8; try 'lauf'$"
    assert re.match(rb"name=.* " + rule, line), line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "c.yaml"]


def test_what_the_locale_cannot_write_in_a_run_is_one_line(tmp_path):
    """A run that began under UTF-8 names its directory in its config; a path of that name fails where it is used."""
    text = "name: run\nrun_dir: l\u00e4ufe\ndata: {sources: [{path: a.txt}]}\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    (tmp_path / STARTED_IN).write_text(str(tmp_path))
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "launcher", "data", "show", str(tmp_path), "--step", "1"]
    done = subprocess.run(command, env=environment, capture_output=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.endswith(
        b"must be letters that this locale's encoding (ascii) knows; set LC_ALL=C.UTF-8, and try again"
    )
