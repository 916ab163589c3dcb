"""`roundtable data` on real runs: resumed on other ranks with another batch size, and rolled back.

What the commands say is compared with the tokens that the ranks wrote down as they were given them, and with the
documents that the token files were written from.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from data.config import SourceConfig
from data.spans import find_document
from data_reference import write_token_file
from data_runs import given_rows, run_recorded
from health_runs import Plan
from launcher.cli import main
from launcher.commands.data_run import open_run
from launcher.commands.data_where import place_row
from launcher.config.tree import CheckpointConfig, HealthConfig, MetricsConfig, RunConfig, WandbConfig
from launcher.training.ledger_rows import StepData
from layout_runs import DENSE_MODEL, VOCAB_SIZE, run_config

SEQ_LEN = 24
# Samples of each step as the settings below have them: 4 steps of 8, then of 4; step 6 spikes, and goes back to step 4.
TAKEN = [(0, 8), (8, 16), (16, 24), (24, 32), (40, 44), (44, 48)]


@dataclasses.dataclass
class Runs:
    folder: Path
    documents: dict[str, list[list[int]]]  # by SOURCE/FILE
    config: RunConfig


def a_config(folder: Path, name: str, **train: object) -> RunConfig:
    config = run_config(str(folder / "books"), model=DENSE_MODEL, micro_batch_size=2, **train)
    sources = (SourceConfig(path=str(folder / "books"), weight=3.0), SourceConfig(path=str(folder / "code")))
    return dataclasses.replace(
        config,
        name=name,
        run_dir=str(folder / name),
        data=dataclasses.replace(config.data, sources=sources),
        checkpoint=CheckpointConfig(every_steps=2),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
        health=HealthConfig(on_spike="rollback", spike_window=4, spike_z=20.0),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """``first`` as above, on 2 ranks and then on 1; ``plain``, of batches of 8."""
    folder, draw = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    documents = {}
    for name, n_documents in (("books", 30), ("code", 8)):
        own = [draw.integers(1, VOCAB_SIZE, int(n)).tolist() for n in draw.integers(1, 40, n_documents)]
        write_token_file(folder / name, own)
        documents[f"{name}/{name}"] = own
    first = a_config(folder, "first", steps=4, global_batch_size=8)
    assert run_recorded(made(folder / "given-first"), Plan(), first, 2) == [0, 0]
    again = a_config(folder, "first", steps=6, global_batch_size=4)
    assert run_recorded(folder / "given-first", Plan(spiked=37), again, 1) == [0]
    assert run_recorded(made(folder / "given-plain"), Plan(), a_config(folder, "plain", steps=5), 1) == [0]
    return Runs(folder, documents, again)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def ask(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict:
    assert main(["data", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def tokens_of(runs: Runs, span: dict) -> list[int]:
    """A span's tokens, cut out of the documents that the files were written from."""
    name, number = span["document"].split(":")
    documents = runs.documents[name]
    first = sum(map(len, documents[: int(number)])) + span["offset"]
    assert span["tokens"][0] == first
    n_tokens = span["tokens"][1] - first
    assert 0 < n_tokens <= len(documents[int(number)]) - span["offset"]
    return documents[int(number)][span["offset"] :][:n_tokens]


def rows_of(runs: Runs, shown: dict) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    for span in shown["spans"]:
        rows.setdefault(span["sample"], []).extend(tokens_of(runs, span))
    return [row + [0] * (SEQ_LEN - len(row)) for row in rows.values()]


def test_a_step_is_shown_as_its_ranks_were_given_it(runs, capsys):
    given = given_rows(runs.folder / "given-first")
    assert sorted(given) == [1, 2, 3, 4, 5, 6]
    for step, (first, stop) in enumerate(TAKEN, 1):
        shown = ask(capsys, "show", str(runs.folder / "first"), "--step", str(step))
        assert sorted(rows_of(runs, shown)) == sorted(given[step])
        assert (shown["first_sample"], shown["last_sample"], shown["sequences"]) == (first, stop - 1, stop - first)
        assert shown["left_out"] == ([[32, 40]] if step == 5 else [])
        assert shown["trained"] is True
        assert sum(row["sequences"] for row in shown["sources"]) == stop - first
        assert sum(row["tokens"] for row in shown["sources"]) == sum(map(len, rows_of(runs, shown))) - sum(
            row.count(0) for row in rows_of(runs, shown)
        )


def test_planted_show_that_forgets_what_was_left_out_is_noticed(runs, capsys, monkeypatch):
    monkeypatch.setattr(StepData, "samples", lambda self: np.arange(self.begin, self.begin + self.n_samples))
    with pytest.raises(AssertionError):
        test_a_step_is_shown_as_its_ranks_were_given_it(runs, capsys)


def test_a_document_is_found_in_the_steps_that_show_it(runs, capsys):
    """Every document, against all steps turned around."""
    run = str(runs.folder / "first")
    shown: dict[str, list[tuple[int, int, list[int]]]] = {}
    for step in range(1, 7):
        for span in ask(capsys, "show", run, "--step", str(step))["spans"]:
            shown.setdefault(span["document"], []).append((step, span["sample"], span["tokens"]))
    left_out, opened = 0, open_run(run)
    steps = list(opened.steps())
    for name, documents in runs.documents.items():
        for number, document in enumerate(documents):
            place = place_row(opened, find_document(opened.dataset, f"{name}:{number}", "--document"), steps)
            assert place["tokens"][1] - place["tokens"][0] == len(document)
            seen = [(each["step"], each["sample"], each["tokens"]) for each in place["seen"]]
            assert sorted(seen) == sorted(shown.get(f"{name}:{number}", []))
            assert all(32 <= each["sample"] < 40 for each in place["left_out"])
            left_out += len(place["left_out"])
    assert left_out
    assert ask(capsys, "where", run, "--document", f"{name}:{number}")["places"] == [place]


def test_two_runs_part_where_the_batch_size_changed(runs, capsys):
    first, plain = (str(runs.folder / name) for name in ("first", "plain"))
    found = ask(capsys, "diff", first, plain, code=1)
    assert (found["same_steps"], found["difference"]["step"], found["dropped_by_one"]) == (4, 5, None)
    ours, theirs = found["difference"]["sides"]
    assert (ours["first_sample"], ours["left_out"], theirs["first_sample"]) == (40, [[32, 40]], 32)
    given = given_rows(runs.folder / "given-first")[5], given_rows(runs.folder / "given-plain")[5]
    assert found["difference"]["equal_sequences"] == 0 and given[0][0] != given[1][0]
    assert [each["key"] for each in found["config"]] == ["train.global_batch_size"]
    assert ask(capsys, "diff", first, first)["difference"] is None


@pytest.mark.slow
def test_a_run_without_its_ledger_is_worked_out_from_its_checkpoint(runs, capsys):
    """Where the batch sizes of the config lead to what the checkpoint has consumed; else it is refused."""
    plain, first = runs.folder / "plain", runs.folder / "first"
    before = [ask(capsys, "show", str(plain), "--step", str(step)) for step in range(1, 6)]
    (plain / "ledger.jsonl").rename(plain / "kept.jsonl")
    after = [ask(capsys, "show", str(plain), "--step", str(step)) for step in range(1, 6)]
    assert [{**each, "trained": None} for each in before] == after
    (plain / "kept.jsonl").rename(plain / "ledger.jsonl")
    (first / "ledger.jsonl").rename(first / "kept.jsonl")
    assert main(["data", "show", str(first), "--step", "1"]) == 2
    assert "they changed within the run" in capsys.readouterr().err
    (first / "kept.jsonl").rename(first / "ledger.jsonl")


def test_a_ledger_that_its_checkpoint_contradicts_is_refused(runs, capsys):
    ledger = runs.folder / "plain" / "ledger.jsonl"
    rows = ledger.read_text()
    for broken, said in (
        (rows.replace('"last_sample": 39', '"last_sample": 38'), "must agree with step-00000005"),
        ("".join(rows.splitlines(True)[:-1]), "ends at step 4, before step-00000005"),
        ("".join(rows.splitlines(True)[1:]), "must go on with step 1 from sample 0 on"),
    ):
        ledger.write_text(broken)
        assert main(["data", "diff", str(runs.folder / "plain"), str(runs.folder / "first")]) in (1, 2)
        assert main(["data", "where", str(runs.folder / "plain"), "--document", "books/books:0"]) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert said in line
    ledger.write_text(rows)
