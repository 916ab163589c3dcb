"""`roundtable branch`: a run that goes on from another's checkpoint, as that one did or with other settings."""

import os
import shlex
import shutil
from pathlib import Path

import pytest

from command_runs import numbers, train, updates, write_config
from launcher.cli import main
from launcher.commands import branch
from launcher.commands.branch import branched_config
from launcher.config.load import load_config
from launcher.training.start import start_training
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens

pytestmark = pytest.mark.xdist_group("branch")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of a run of six steps on one rank, with checkpoints after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("made")
    train(write_config(folder, write_tokens(folder), "run"), 1)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows_of(run: Path) -> list[dict]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def test_a_branch_goes_on_as_the_run_did_bit_for_bit_and_says_where_it_came_from(made, tmp_path, capsys):
    before = files_of(made)
    assert main(["branch", str(made / "run"), str(tmp_path / "new"), "--step", "4"]) == 0
    assert files_of(made) == before
    assert start_training(tmp_path / "new/config.yaml", [], 1) == 0
    assert numbers(rows_of(tmp_path / "new")) == numbers(updates(made / "run.yaml")[4:])
    capsys.readouterr()
    assert main(["checkpoint", "show", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.startswith(f"branched from {made / 'run'} at step 4\n")
    assert main(["replay", str(tmp_path / "new"), "--step", "6"]) == 0  # a branch has a record of its own


@pytest.mark.slow
def test_other_settings_are_the_branchs_own(made, tmp_path):
    """The first step's loss is the run's, which no setting changes yet; the second step's is another."""
    arguments = [str(made / "run"), str(tmp_path / "new"), "--step", "4", "optimizer.lr=0.01"]
    assert main(["branch", *arguments]) == 0
    assert load_config(tmp_path / "new/config.yaml").optimizer.lr == 0.01
    assert start_training(tmp_path / "new/config.yaml", [], 1) == 0
    ours, theirs = rows_of(tmp_path / "new"), updates(made / "run.yaml")[4:]
    assert ours[0]["loss"] == theirs[0]["loss"] and ours[1]["loss"] != theirs[1]["loss"]


REFUSED = {
    "no such checkpoint": (["--step", "3"], "--step=3 must be that of a checkpoint of"),
    "another model": (["--step", "4", "model.n_layers=4"], "model.n_layers=4 must stay 3"),
    "another order of data": (
        ["--step", "4", "seed=1"],
        "seed=1 must stay 0, as RUN/checkpoints/step-00000004/config.yaml has it",
    ),
    "another name": (["--step", "4", "name=x"], "name=x must be left out: NEW="),
    "another place": (["--step", "4", "run_dir=x"], "run_dir=x must be left out: NEW="),
    "checkpoints elsewhere": (["--step", "4", "checkpoint.dir=x"], "checkpoint.dir=x must be left out: NEW="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_take_a_line_and_create_nothing(case, made, tmp_path, capsys):
    arguments, expected = REFUSED[case]
    assert main(["branch", str(made / "run"), str(tmp_path / "new"), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(expected.replace("RUN", str(made / "run"))) and list(tmp_path.iterdir()) == []


def test_a_branch_within_the_run_is_refused(made, tmp_path, capsys):
    before = files_of(made)
    (tmp_path / "link").symlink_to(made / "run")
    for new in (made / "run/new", made / "run/logs/a/new", tmp_path / "link/new"):
        assert main(["branch", str(made / "run"), str(new), "--step", "4"]) == 2
        rule = "must lie outside the run directory, which is only read"
        assert capsys.readouterr().err == f"NEW={new} {rule}; choose another\n"
    assert files_of(made) == before


def test_the_command_that_goes_on_can_be_pasted(made, tmp_path, capsys):
    new = tmp_path / "it's new"
    assert main(["branch", str(made / "run"), str(new), "--step", "4"]) == 0
    _, command, rest = capsys.readouterr().out.splitlines()[-1].split("`")
    assert shlex.split(command) == ["roundtable", "train", f"{new}/config.yaml"] and rest == " goes on from there"
    assert main(["branch", str(made / "run"), str(tmp_path / "last"), "--step", "6"]) == 0
    assert capsys.readouterr().out.endswith(
        " goes on from there after you raise train.steps above 6, which it has already reached\n"
    )


def test_what_is_there_already_and_what_is_damaged_is_refused(made, tmp_path, capsys):
    (tmp_path / "new").mkdir()
    assert main(["branch", str(made / "run"), str(tmp_path / "new"), "--step", "4"]) == 2
    assert "must be a new folder, and is there already" in capsys.readouterr().err
    shutil.copytree(made / "run", tmp_path / "copy")
    (shard, *_) = (tmp_path / "copy/checkpoints/step-00000004").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert main(["branch", str(tmp_path / "copy"), str(tmp_path / "other"), "--step", "4"]) == 2
    assert "its checkpoint step-00000004 is damaged" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("more", [[], ["--without", "tokens/tokens:3"]])
def test_a_run_that_has_no_checkpoint_left_is_told_so(more, made, tmp_path, capsys):
    shutil.copytree(made / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/checkpoints")
    assert main(["branch", str(tmp_path / "copy"), str(tmp_path / "new"), "--step", "4", *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"RUN={tmp_path}/copy holds no checkpoint; give a run directory with checkpoints/step-N"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["123", "007", "1e3", "[a]", "~", "a #b", "é: b"])
def test_a_branch_is_where_it_was_asked_for_whatever_yaml_makes_of_its_name(name, made, tmp_path):
    assert main(["branch", str(made / "run"), str(tmp_path / name), "--step", "4"]) == 0
    config = load_config(tmp_path / name / "config.yaml")
    assert (config.run_dir, config.name) == (str(tmp_path / name), name)


@pytest.mark.parametrize("change", ["deleted", "changed", "replaced"])
def test_a_checkpoint_that_changes_while_it_is_copied_is_refused(change, made, tmp_path, monkeypatch, capsys):
    """As the retention of a live run does; between verifying and copying."""
    shutil.copytree(made / "run", tmp_path / "copy")
    folder = tmp_path / "copy/checkpoints/step-00000004"

    def check_and_change(*arguments, **options):
        config = branched_config(*arguments, **options)
        (shard, *_) = folder.glob("*.safetensors")
        if change == "changed":
            shard.write_bytes(shard.read_bytes()[:-1] + b"x")
        else:
            shutil.rmtree(folder)
        if change == "replaced":
            shutil.copytree(folder.with_name("step-00000006"), folder)
        return config

    monkeypatch.setattr(branch, "branched_config", check_and_change)
    assert main(["branch", str(tmp_path / "copy"), str(tmp_path / "new"), "--step", "4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--step=4 must stay until it is copied, and was deleted or changed meanwhile (")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_branch_where_a_folders_name_is_no_text_is_refused(made, tmp_path, monkeypatch, capsys):
    folder = tmp_path / os.fsdecode(b"d\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert main(["branch", str(made / "run"), "new", "--step", "4"]) == 2
    told = "NEW=new must have a whole path of text, as config.yaml will name it; choose another\n"
    assert capsys.readouterr().err == told and list(folder.iterdir()) == []
