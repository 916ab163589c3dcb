"""`roundtable runs`: the table of runs, of damaged ones too, and quick whatever their metrics' size."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path

import pytest

from data.partial import partial_suffix
from launcher.cli import main
from launcher.commands.runs import holds_lock, last_lines, list_runs, summarize
from launcher.completion import offer_runs
from launcher.config.dump import dump_config
from launcher.config.tree import CheckpointConfig, RunConfig, TrainConfig
from launcher.slurm import follow
from launcher.tables import loss_text
from launcher.training.run_dir import claim
from parallel.config import ParallelConfig


def make_run(path: Path, steps: int = 10, done: int = 0, events: tuple[str, ...] = (), **config) -> Path:
    (path / "checkpoints").mkdir(parents=True)
    tree = RunConfig(name=path.name, train=TrainConfig(steps=steps), parallel=ParallelConfig(tp=2), **config)
    (path / "config.yaml").write_text(dump_config(tree))
    rows = [{"step": 0, "event": "start", "ranks": 4}] if done else []
    rows += [{"step": n, "loss": 9.0 / n} for n in range(1, done + 1)]
    rows += [{"step": done, "eval_loss": 5.25}] if done else []
    rows += [{"step": done, "event": event} for event in events]
    if rows:
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, (name, done, events) in enumerate(
        [("fresh", 0, ()), ("done", 10, ("checkpoint",)), ("stopped", 4, ("stopped",)), ("crashed", 5, ())]
    ):
        path = make_run(tmp_path / "runs" / name, done=done, events=events)
        for file in path.iterdir():
            os.utime(file, (1e9 + number, 1e9 + number))
    for step in (4, 8, 10):
        (tmp_path / f"runs/done/checkpoints/step-{step:08d}").mkdir()
    return tmp_path / "runs"


def test_what_is_no_number_is_valid_json(tmp_path, monkeypatch, capsys):
    """Of a run whose loss is NaN; Python alone reads a bare NaN."""
    monkeypatch.chdir(tmp_path)
    path = make_run(tmp_path / "runs/a", done=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": "NaN"}\n{"step": 4, "eval_loss": "Infinity"}\n')
    monkeypatch.setattr(follow, "require", lambda *_: None)
    monkeypatch.setattr(follow, "live_jobs", lambda *_: [])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert main(["runs", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert (row["loss"], row["eval_loss"]) == ("NaN", "Infinity")
    assert main(["status", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=refuse)["loss"] == "NaN"


def test_each_state_is_told(runs, capsys):
    found = list_runs([])
    assert [(Path(run.path).name, run.state, run.step) for run in found] == [
        ("crashed", "crashed", 5),
        ("stopped", "stopped", 4),
        ("done", "finished", 10),
        ("fresh", "never started", None),
    ]
    done = found[2]
    assert (done.steps, done.loss, done.eval_loss, done.checkpoints, done.newest_checkpoint) == (10, 0.9, 5.25, 3, 10)
    assert (done.layout, found[3].layout) == ("4 ranks, tp 2, ZeRO 1", "tp 2, ZeRO 1")
    assert main(["runs", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["crashed", "stopped", "finished", "never started"]
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split()[:4] == ["done", "finished", "10/10", "0.9000"]


def test_a_run_that_was_stopped_and_went_on_is_judged_by_its_end(tmp_path):
    path = make_run(tmp_path / "r", done=4, events=("stopped",))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "event": "start", "ranks": 8}\n{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    run = summarize(path)
    assert (run.state, run.step, run.layout) == ("crashed", 5, "8 ranks, tp 2, ZeRO 1")


def test_a_live_run_is_told_by_its_lock_without_touching_it(tmp_path):
    path = make_run(tmp_path / "r", done=4)
    with (tmp_path / "other").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # the kernel's list is not empty, whatever else runs here
        with (path / ".lock").open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "slurm_job": None}))
            lock.flush()
            if not any(str(os.getpid()) in line for line in Path("/proc/locks").read_text().splitlines()):
                pytest.skip("this kernel lists no locks")
            run = summarize(path)
            assert (run.state, run.where) == ("running", f"{socket.gethostname()}, pid {os.getpid()}")
        assert summarize(path).state == "crashed"


def test_a_run_of_another_machine_is_running_while_it_writes(tmp_path):
    path = make_run(tmp_path / "r", done=4)
    (path / ".lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "slurm_job": "12_3"}))
    assert (summarize(path).state, summarize(path).where) == ("running", "job 12_3")
    long_ago = time.time() - 3600
    os.utime(path / "metrics.jsonl", (long_ago, long_ago))
    assert summarize(path).state == "crashed"


@pytest.mark.parametrize(("done", "events", "state"), [(10, (), "finished"), (4, ("stopped",), "stopped")])
def test_a_run_that_has_ended_on_another_machine_is_not_running(tmp_path, monkeypatch, done, events, state):
    """Its last row is seconds old."""
    path = make_run(tmp_path / "r", done=done, events=events)
    config = RunConfig(name="r", run_dir=str(path), train=TrainConfig(steps=10), parallel=ParallelConfig(tp=2))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        held = claim(config)
        elsewhere.undo()
        assert summarize(path).state == "running"
        elsewhere.setattr(socket, "gethostname", lambda: "elsewhere")
        held.close()
        held.close()
    assert summarize(path).state == state


def test_a_start_that_was_succeeded_leaves_its_successors_word(tmp_path):
    held = claim(RunConfig(name="r", run_dir=str(tmp_path / "r")))
    word = json.dumps({"host": "other", "pid": 7, "slurm_job": "8", "slurm_restarts": 0})
    (tmp_path / "r/.lock").write_text(word)
    held.close()
    assert (tmp_path / "r/.lock").read_text() == word


def test_locks_are_read_as_the_kernel_lists_them(tmp_path):
    listed = tmp_path / "locks"
    listed.write_text(
        "1: FLOCK  ADVISORY  WRITE 77 fd:01:4711 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 78 fd:01:4711 0 EOF\n"
    )
    assert [holds_lock(pid, inode, listed) for pid, inode in ((77, 4711), (77, 4712), (79, 4711))] == [
        True,
        False,
        False,
    ]


METRICS, CONFIG, CHECKPOINTS = "metrics.jsonl", "config.yaml", "checkpoints"


def replaced(name, make):
    """Puts something else in the place of a run's file."""

    def damage(path):
        (path / name).unlink()
        make(path / name)

    return damage, name


def make_file_of_checkpoints(path):
    (path / CHECKPOINTS).rmdir()
    (path / CHECKPOINTS).write_text("")


DAMAGE = {
    "config_cut": replaced(CONFIG, lambda path: path.write_text("train: {steps: [\n")),
    "config_binary": replaced(CONFIG, lambda path: path.write_bytes(b"\xff\x00" * 50)),
    "config_gone": replaced(CONFIG, lambda path: None),
    "config_folder": replaced(CONFIG, Path.mkdir),
    "metrics_folder": replaced(METRICS, Path.mkdir),
    "metrics_pipe": replaced(METRICS, os.mkfifo),
    "metrics_text": replaced(METRICS, lambda path: path.write_text("a\nb\nc\nd\n")),
    "link_loop": replaced(METRICS, lambda path: path.symlink_to(path.name)),
    "checkpoints_file": (make_file_of_checkpoints, CHECKPOINTS),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_run_is_listed_with_what_is_wrong(tmp_path, monkeypatch, capsys, case):
    monkeypatch.chdir(tmp_path)
    damage, named = DAMAGE[case]
    damage(make_run(tmp_path / "runs" / "bad", done=4))
    make_run(tmp_path / "runs" / "good", done=10)
    assert main(["runs"]) == 0
    captured = capsys.readouterr()
    line = captured.out.splitlines()[-1]
    assert line.startswith("runs/bad") and named in line
    assert "finished" in captured.out
    assert captured.err == ""


def test_a_name_commands_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "a\x1b]0;owned\x07[red]b", done=10)
    (make_run(tmp_path / "runs" / "\x1b[2J", done=2) / CONFIG).unlink()
    assert main(["runs"]) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output and "\x07" not in output
    assert "a\\x1b]0;owned\\x07[red]b" in output


@pytest.mark.parametrize("lock", ["", "null", "[]", "{", '{"pid": "x", "host": null}', "\0\0"])
def test_a_damaged_lock_is_no_running_run(tmp_path, lock):
    path = make_run(tmp_path / "r", done=4)
    (path / ".lock").write_text(lock)
    assert summarize(path).state in ("crashed", "running")


def test_checkpoints_at_a_url_are_those_on_record(tmp_path, monkeypatch, capsys):
    """The store itself is not asked; an empty cell would say that there are none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    path = make_run(tmp_path / "runs/a", done=8, checkpoint=CheckpointConfig(dir="s3://bucket/a"))
    assert summarize(path).checkpoints is None and summarize(path).newest_checkpoint is None
    (path / ".newest_checkpoint").write_text("step-00000006\ns3://bucket/a\n")
    assert summarize(path).checkpoints is None and summarize(path).newest_checkpoint == 6
    assert main(["runs"]) == 0
    assert "to step 6" in capsys.readouterr().out


def test_a_loss_that_has_diverged_breaks_no_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = make_run(tmp_path / "runs/a", done=3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1.5e30}\n{"step": 4, "eval_loss": -3.25e18}\n')
    assert main(["runs"]) == 0
    output = capsys.readouterr().out
    assert "1.5e+30" in output and "-3.25e+18" in output and "0000" not in output


@pytest.mark.parametrize(
    ("value", "text"), [(2.70805, "2.7081"), (999999.0, "999999.0000"), (1e6, "1e+06"), (float("nan"), "nan")]
)
def test_a_loss_as_people_read_it(value, text):
    assert loss_text(value) == text


def test_what_an_import_or_a_mean_has_not_finished_is_no_run(runs, capsys):
    make_run(runs / f".mean.{partial_suffix()}")
    assert [Path(run.path).name for run in list_runs([])] == ["crashed", "stopped", "done", "fresh"]
    assert offer_runs("") == ["crashed", "done", "fresh", "stopped"]


def test_nothing_to_list(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "no run in runs\n"
    make_run(tmp_path / "runs" / "one")
    assert [run.path for run in list_runs(["one"])] == ["runs/one"]
    assert main(["runs", "none"]) == 2
    assert capsys.readouterr().err == "DIR=none must be a folder of runs, or a run directory; check it\n"


def test_the_last_lines_are_whole(tmp_path):
    (tmp_path / "m").write_bytes(b"one\ntwo\n\nthree\nfou")
    assert last_lines(tmp_path / "m", 100) == [b"one", b"two", b"three", b"fou"]
    assert last_lines(tmp_path / "m", 12) == [b"three", b"fou"]


@pytest.mark.parametrize("has_evaluation", [True, False])
def test_hundreds_of_long_runs_are_listed_quickly(tmp_path, has_evaluation):
    row = json.dumps({"step": 9, "loss": 1.0, "moe/layer_00/load": [0.125] * 64}).encode() + b"\n"
    config = (make_run(tmp_path / "model", checkpoint=CheckpointConfig(every_steps=5)) / CONFIG).read_text()
    for number in range(100):
        path = tmp_path / "runs" / f"run-{number}"
        path.mkdir(parents=True)
        (path / CONFIG).write_text(config)
        with (path / METRICS).open("wb") as file:  # a gigabyte that is not there
            file.write(b'{"step": 0, "event": "start", "ranks": 2}\n')
            file.seek(1 << 30)
            file.write(b"\n" + row * 20 + (b'{"step": 9, "eval_loss": 2.0}\n' if has_evaluation else b""))
    started = time.process_time()
    found = list_runs([str(tmp_path / "runs")])
    assert time.process_time() - started < 2.0
    assert {(run.step, run.loss, run.eval_loss) for run in found} == {(9, 1.0, 2.0 if has_evaluation else None)}
    assert {run.layout for run in found} == {"2 ranks, tp 2, ZeRO 1"}
