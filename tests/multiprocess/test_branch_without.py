"""`roundtable branch --without`: from which checkpoint, what it says, and what the new run is."""

import json
import shutil
from pathlib import Path

import pytest

from command_runs import numbers, train, updates, write_config
from launcher.cli import main
from launcher.commands import branch_without
from launcher.training.start import start_training
from launcher.watch.metrics import read_metrics
from layout_runs import write_tokens

pytestmark = pytest.mark.xdist_group("branch_without")  # the run that its tests share takes long to make


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of a run of six AdamW steps of experts on one process, with checkpoints after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("made")
    train(write_config(folder, write_tokens(folder), "run"), 1)
    return folder


def seen_first(made: Path, capsys) -> dict[int, list[str]]:
    """By step, the documents that it was the first to see."""
    first: dict[str, int] = {}
    for step in range(1, 7):
        capsys.readouterr()
        assert main(["data", "show", str(made / "run"), "--step", str(step), "--json"]) == 0
        for span in json.loads(capsys.readouterr().out)["spans"]:
            first.setdefault(span["document"], step)
    return {step: [name for name, seen in first.items() if seen == step] for step in range(1, 7)}


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows_of(run: Path) -> list[dict]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def write_list(path: Path, names: list[str]) -> str:
    path.write_text("".join(json.dumps({"document": name}) + "\n" for name in names))
    return str(path)


def never_saw(made: Path, folder: Path, names: list[str]) -> list[dict]:
    """The rows of a run that leaves the documents out from its first step on."""
    config = write_config(folder, str(made / "tokens"), "never")
    return train(config, 1, f"data.without={write_list(folder / 'never.jsonl', names)}")


def test_a_branch_is_the_run_that_never_saw_them_bit_for_bit(made, tmp_path, capsys):
    """First seen in steps 3 and 5: it begins at step 2, and says so; data commands, checkpoints and a resume know."""
    first, before = seen_first(made, capsys), files_of(made)
    names = [*first[3][:2], *first[5][:2]]
    listed = write_list(tmp_path / "list.jsonl", names[:3])
    arguments = [str(made / "run"), str(tmp_path / "new"), "--step", "5"]
    assert main(["branch", *arguments, "--without", listed, "--without", names[3]]) == 0
    told = capsys.readouterr().out
    assert "at step 2: no step up to then had seen the 4 documents (the run first saw one of them in step 3)" in told
    assert files_of(made) == before
    new = tmp_path / "new"
    assert start_training(new / "config.yaml", ["train.steps=4"], 1) == 0
    assert start_training(new / "config.yaml", ["train.steps=6"], 1) == 0  # resumed
    expected = never_saw(made, tmp_path, names)
    assert numbers(rows_of(new)) == numbers(expected[2:])
    assert numbers(rows_of(new)) != numbers(updates(made / "run.yaml")[2:])
    capsys.readouterr()
    assert main(["checkpoint", "show", str(new)]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert line == f"branched from {made / 'run'} at step 2, without 4 documents, none of which had been seen by then"
    assert main(["data", "where", str(new), "--document", names[0], "--json"]) == 0
    (place,) = json.loads(capsys.readouterr().out)["places"]
    assert place["without"] and not place["seen"] and place["left_out"]
    assert main(["data", "show", str(new), "--step", "3"]) == 0
    assert "left out by data.without" in capsys.readouterr().out
    assert main(["data", "diff", str(made / "run"), str(new), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"]["step"] == 3
    assert main(["data", "diff", str(tmp_path / "never"), str(new), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same_steps"] == 4
    assert main(["data", "show", str(new), "--step", "2"]) == 2
    assert "since it was branched at step 2; give 3 to 6" in capsys.readouterr().err
    assert main(["replay", str(new), "--step", "6"]) == 0
    assert "reproduced" in capsys.readouterr().out


def test_planted_a_checkpoint_from_after_they_were_seen_is_noticed(made, tmp_path, capsys, monkeypatch):
    """The comparison above fails where the choice overlooks what earlier steps had read."""
    names = seen_first(made, capsys)[3][:2]
    monkeypatch.setattr(branch_without, "steps_with", lambda run, document: set())
    assert main(["branch", str(made / "run"), str(tmp_path / "new"), "--step", "5", "--without", names[0]]) == 0
    assert start_training(tmp_path / "new/config.yaml", [], 1) == 0
    assert numbers(rows_of(tmp_path / "new")) != numbers(never_saw(made, tmp_path, names)[4:])


def test_what_had_been_seen_before_every_checkpoint_is_said_plainly(made, tmp_path, capsys):
    name = seen_first(made, capsys)[1][0]
    assert main(["branch", str(made / "run"), str(tmp_path / "new"), "--step", "3", "--without", name]) == 0
    told = capsys.readouterr().out
    assert "it had been seen by then, first in step 1, and no checkpoint from before is left" in told
    lineage = json.loads((tmp_path / "new/branched_from.json").read_text())
    assert (lineage["step"], lineage["without"]["first_seen"]) == (2, 1)


def where(run: Path, document: str, capsys) -> tuple[dict, str]:
    """What `data where` says of a document: its row of --json, and its first line in words."""
    capsys.readouterr()
    assert main(["data", "where", str(run), "--document", document, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["places"]
    assert main(["data", "where", str(run), "--document", document]) == 0
    return row, capsys.readouterr().out.splitlines()[0]


def test_where_says_what_the_weights_know_of_a_document_that_is_left_out(made, tmp_path, capsys):
    """One was seen before the branch, one was not; then the parent is gone, and less is known."""
    first, parent, new = seen_first(made, capsys), tmp_path / "run", tmp_path / "new"
    shutil.copytree(made / "run", parent)
    known, unknown = first[1][0], first[6][0]
    assert main(["branch", str(parent), str(new), "--step", "3", "--without", known, "--without", unknown]) == 0
    assert start_training(new / "config.yaml", ["train.steps=6"], 1) == 0
    row, line = where(new, known, capsys)
    assert row["without"] and not row["seen"] and row["before"]["first_seen"] == 1
    assert line.endswith("but the weights were trained on it: seen from step 1 on, before the branch at step 2")
    row, line = where(new, unknown, capsys)
    assert (row["before"]["first_seen"], row["before"]["known_from"]) == (None, 1)
    assert line.endswith("never seen, left out by data.without")
    shutil.rmtree(parent)
    for document in (known, unknown):
        row, line = where(new, document, capsys)
        assert (row["before"]["first_seen"], row["before"]["known_from"]) == (None, 3)
        assert line.endswith("no record is left of steps before 3, and documents of the list were seen from step 1 on")


def test_where_knows_that_none_was_seen_though_the_parent_is_gone(made, tmp_path, capsys):
    document, parent, new = seen_first(made, capsys)[6][0], tmp_path / "run", tmp_path / "new"
    shutil.copytree(made / "run", parent)
    assert main(["branch", str(parent), str(new), "--step", "4", "--without", document]) == 0
    assert start_training(new / "config.yaml", ["train.steps=6"], 1) == 0
    shutil.rmtree(parent)
    assert where(new, document, capsys)[1].endswith("never seen, left out by data.without")


def test_a_branch_that_stands_in_its_parents_place_has_none(made, tmp_path, capsys):
    """The parent was removed, and the branch given its name: its record would lead to itself without end."""
    known, parent, new = seen_first(made, capsys)[1][0], tmp_path / "run", tmp_path / "new"
    shutil.copytree(made / "run", parent)
    assert main(["branch", str(parent), str(new), "--step", "3", "--without", known]) == 0
    assert start_training(new / "config.yaml", ["train.steps=6"], 1) == 0
    shutil.rmtree(parent)
    new.rename(parent)
    config = parent / "config.yaml"
    config.write_text(config.read_text().replace(str(new), str(parent)))
    assert "no record is left of steps before 3" in where(parent, known, capsys)[1]


def test_another_run_in_a_parents_place_is_not_the_parent(made, tmp_path, capsys):
    known, parent, new = seen_first(made, capsys)[1][0], tmp_path / "run", tmp_path / "new"
    shutil.copytree(made / "run", parent)
    assert main(["branch", str(parent), str(new), "--step", "3", "--without", known]) == 0
    assert start_training(new / "config.yaml", ["train.steps=4"], 1) == 0
    assert "seen from step 1 on, before the branch at step 2" in where(new, known, capsys)[1]
    shutil.rmtree(parent)
    assert start_training(made / "run/config.yaml", [f"run_dir={parent}", "train.steps=3", "seed=1"], 1) == 0
    assert "no record is left of steps before 3" in where(new, known, capsys)[1]


def test_a_record_that_names_its_own_run_as_the_parent_leads_nowhere(made, tmp_path, capsys):
    known, run = seen_first(made, capsys)[1][0], tmp_path / "run"
    shutil.copytree(made / "run", run)
    record = {"run": str(run), "step": 0, "run_id": (run / ".run_id").read_text().strip()}
    (run / "branched_from.json").write_text(json.dumps(record))
    assert main(["branch", str(run), str(tmp_path / "new"), "--step", "3", "--without", known]) == 0


@pytest.mark.slow
def test_a_branch_of_a_branch_leaves_out_what_both_name(made, tmp_path, capsys):
    first = seen_first(made, capsys)
    new, again = tmp_path / "new", tmp_path / "again"
    assert main(["branch", str(made / "run"), str(new), "--step", "4", "--without", first[5][0]]) == 0
    assert start_training(new / "config.yaml", [], 1) == 0
    capsys.readouterr()
    assert main(["branch", str(new), str(again), "--step", "6", "--without", first[1][0]]) == 0
    assert "it had been seen by then, first in step 1" in capsys.readouterr().out  # in the first run's step
    assert {json.loads(line)["document"] for line in (again / "without.jsonl").read_text().splitlines()} == {
        first[1][0],
        first[5][0],
    }
    assert main(["branch", str(new), str(tmp_path / "same"), "--step", "6"]) == 0
    assert (tmp_path / "same/without.jsonl").read_bytes() == (new / "without.jsonl").read_bytes()


@pytest.mark.slow
def test_a_list_that_was_changed_is_refused_at_a_resume_and_may_lie_elsewhere(made, tmp_path, capsys):
    first, new = seen_first(made, capsys), tmp_path / "new"
    assert main(["branch", str(made / "run"), str(new), "--step", "4", "--without", first[5][0]]) == 0
    assert start_training(new / "config.yaml", ["train.steps=5"], 1) == 0
    shutil.move(new / "without.jsonl", tmp_path / "moved.jsonl")
    before, config = files_of(new), str(new / "config.yaml")
    capsys.readouterr()
    assert main(["train", config, "--ranks", "1", "train.steps=6"]) == 2
    assert "must be a file that lists documents, and is none" in capsys.readouterr().err
    write_list(new / "without.jsonl", [first[5][1]])
    assert main(["train", config, "--ranks", "1", "train.steps=6"]) == 2
    assert "must list the documents that" in capsys.readouterr().err
    assert main(["train", config, "--ranks", "1", "train.steps=6", "data.without=null"]) == 2
    (new / "without.jsonl").unlink()
    assert files_of(new) == before
    moved = f"data.without={tmp_path / 'moved.jsonl'}"
    assert start_training(new / "config.yaml", ["train.steps=6", moved], 1) == 0


REFUSED = {
    "a step not reached": (["--step", "7", "--without", "tokens/tokens:3"], "--step=7 was not reached in"),
    "no checkpoint before": (["--step", "1", "--without", "tokens/tokens:3"], "--step=1 needs a checkpoint of"),
    "no such document": (["--step", "4", "--without", "tokens/tokens:60"], "must end in a number from 0 to 59"),
    "no such file": (["--step", "4", "--without", "\x1b[2Jlist.jsonl"], "must be FILE:NUMBER with FILE one of"),
    "a file that is no list": (["--step", "4", "--without", "LIST"], "must hold a document on each line"),
    "a folder": (["--step", "4", "--without", "FOLDER"], "must be a file that lists documents, and is none"),
    "the key itself": (["--step", "4", "data.without=LIST"], "must be given as --without"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_take_a_line_and_create_nothing(case, made, tmp_path, capsys):
    arguments, expected = REFUSED[case]
    (tmp_path / "list").write_text("documents:\n  - tokens/tokens:3\n")
    arguments = [each.replace("LIST", str(tmp_path / "list")).replace("FOLDER", str(tmp_path)) for each in arguments]
    before = files_of(made)
    assert main(["branch", str(made / "run"), str(tmp_path / "new"), *arguments]) == 2
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 1 and expected in told.err and told.out == "" and "\x1b" not in told.err
    assert files_of(made) == before and [path.name for path in tmp_path.iterdir()] == ["list"]
