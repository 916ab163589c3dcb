"""`roundtable blame` on a real run: shares against one plain process, other layouts, the list it writes, refusals."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from blame_faults import keep_gradients, see_another_document
from command_runs import train, updates, write_config
from data.dataset import open_dataset
from data.spans import document_name, spans_of
from data.without import find_listed, read_list
from launcher.blame import rank
from launcher.blame.aim import Document, Part
from launcher.blame.rank import Blamed, DocumentBlamed, Measured, TokenBlamed, rank_documents
from launcher.blame.report import document_row, print_report
from launcher.cli import main
from launcher.commands import blame as commands
from launcher.config.load import load_config
from launcher.config.tree import RunConfig
from launcher.prove.reference import PlainBatch, ReferenceTrainer
from launcher.replay.report import as_json
from layout_runs import MOE_MODEL, read, write_tokens
from modeling.context import PADDING, Context
from modeling.loss import IGNORE
from parallel.config import ParallelConfig

pytestmark = pytest.mark.xdist_group("blame")  # the run that its tests share takes long to make

LAYOUTS = {
    "one process": (1, "parallel.ep=1"),
    "other micro-batches": (2, "train.micro_batch_size=1"),
    "zero3": (2, "parallel.zero=3"),
    "tp2": (2, "parallel.tp=2", "parallel.ep=1"),
    "cp2": (2, "parallel.cp=2", "parallel.ep=1"),
    "pp2 tp2": (4, "parallel.pp=2", "parallel.tp=2", "parallel.ep=1"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of a run of four steps on two ranks, with balance and z-losses, and checkpoints after 2 and 4."""
    folder = tmp_path_factory.mktemp("made")
    options = {"model": MOE_MODEL, "parallel": ParallelConfig(ep=2, zero=1), "steps": 4}
    train(write_config(folder, write_tokens(folder), "run", **options), 2)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def blame(run: Path, step: int, capsys, *arguments: str) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["blame", str(run), "--step", str(step), "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def gradient(trainer: ReferenceTrainer, batch: PlainBatch, n_targets: int, scales: tuple[float, float]) -> torch.Tensor:
    """That of a batch's losses on one plain process, as one vector."""
    has_padding = bool((batch.documents_BS == PADDING).any())
    context = Context(batch.positions_BS, batch.documents_BS, *scales, has_padding=has_padding)
    trainer.model.zero_grad()
    (trainer.model(batch.tokens_BS, context, batch.targets_BS).loss / n_targets).backward()
    grads = [weight.grad for weight in trainer.model.parameters()]
    return torch.cat([each.flatten().double() for each in grads if each is not None])


@dataclasses.dataclass
class Plain:
    """Of one plain process: shares of the first step's gradient, and the step without each document."""

    shares: dict[str, float]
    loss_without: dict[str, float]
    grad_norm_without: dict[str, float]


def plain_process(config: RunConfig) -> Plain:
    """Each document's share of the first step's gradient, the auxiliary losses', and what is left without it."""
    trainer = ReferenceTrainer(config.model, config.optimizer, seed=config.seed, precision="fp32", loss_scale=1.0)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    indices = np.arange(8)
    batch, starts = read(dataset, indices), dataset.windows(indices)[1]
    n_targets, n_tokens = int((batch.targets_BS != IGNORE).sum()), int((batch.documents_BS != PADDING).sum())
    whole = gradient(trainer, batch, n_targets, (1 / 8, 1 / n_tokens))
    kept: dict[str, torch.Tensor] = {}
    for span in spans_of(dataset, indices):
        name = document_name(dataset, span.file, span.document)
        targets = kept.setdefault(name, torch.full_like(batch.targets_BS, IGNORE))
        inside = slice(span.first - int(starts[span.sample]), span.stop - int(starts[span.sample]))
        targets[span.sample, inside] = batch.targets_BS[span.sample, inside]
    found = Plain({}, {}, {})
    for name, targets in kept.items():
        if bool((targets != IGNORE).any()):
            part = PlainBatch(batch.tokens_BS, targets, batch.positions_BS, batch.documents_BS)
            own = gradient(trainer, part, n_targets, (0.0, 0.0))
            found.shares[name] = float(own @ whole / (whole @ whole))
            left = torch.where(targets == IGNORE, batch.targets_BS, IGNORE)
            n_left = int((left != IGNORE).sum())
            scales = n_targets / n_left / 8, n_targets / n_left / n_tokens
            rest = PlainBatch(batch.tokens_BS, left, batch.positions_BS, batch.documents_BS)
            found.grad_norm_without[name] = float(gradient(trainer, rest, n_left, scales).norm())
            context = Context(batch.positions_BS, batch.documents_BS, 0.0, 0.0)
            found.loss_without[name] = float(trainer.model(batch.tokens_BS, context, left).loss.detach()) / n_left
    nothing = torch.full_like(batch.targets_BS, IGNORE)
    part = PlainBatch(batch.tokens_BS, nothing, batch.positions_BS, batch.documents_BS)
    auxiliary = gradient(trainer, part, n_targets, (1 / 8, 1 / n_tokens))
    found.shares["auxiliary"] = float(auxiliary @ whole / (whole @ whole))
    return found


def shares_in(report: dict) -> dict[str, float]:
    shares = {row["document"]: row["share"] for row in report["documents"]}
    return shares | {"auxiliary": report["auxiliary_share"]}


def test_shares_are_those_of_one_plain_process_and_nothing_is_written(made, capsys):
    before = files_of(made)
    code, report = blame(made / "run", 1, capsys, "--from", "0", "parallel.tp=2", "parallel.ep=1")
    assert code == 0 and files_of(made) == before
    expected = plain_process(load_config(made / "run.yaml"))
    assert shares_in(report) == pytest.approx(expected.shares, rel=1e-4, abs=1e-6)
    for key in ("loss_without", "grad_norm_without"):
        assert {row["document"]: row[key] for row in report["documents"]} == pytest.approx(
            vars(expected)[key], rel=1e-4
        )
    assert report["sum_of_shares"] == pytest.approx(1, abs=1e-5) and abs(report["auxiliary_share"]) > 1e-6


@pytest.fixture(scope="module")
def own(made, tmp_path_factory) -> dict:
    """The report on step 4 under the run's own layout, and the list of its first two documents."""
    listed, out = tmp_path_factory.mktemp("own") / "list.jsonl", []
    arguments = ["blame", str(made / "run"), "--step", "4", "--leave-out", str(listed), "--top", "2", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("launcher.commands.blame.say", out.append)
        assert main(arguments) == 0
    return json.loads(out[0]) | {"list": str(listed)}


def test_the_record_comes_out_bit_for_bit_after_all_passes_and_the_parts_add_up(made, own):
    """The passes over documents leave no trace: the step itself is executed after them."""
    assert own["reproduced"] and own["from"] == 2 and all(step["exact"] for step in own["steps"])
    (row,) = [row for row in updates(made / "run.yaml") if row["step"] == 4]
    assert own["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-6)
    assert own["loss"] == pytest.approx(row["loss"], rel=1e-6)
    assert own["sum_of_shares"] == pytest.approx(1, abs=1e-5)
    assert sum(each["loss_share"] for each in own["documents"]) == pytest.approx(1, abs=1e-6)
    blames = [each["blame"] for each in own["documents"]]
    assert blames == sorted(blames, reverse=True)


def test_the_shares_of_a_documents_tokens_are_parts_of_its_own(own):
    first, losses = own["documents"][0], {}
    for each in own["tokens"]:
        losses.setdefault(each["document"], []).append(each["loss"])
    assert set(losses) == {row["document"] for row in own["documents"][:3]}
    assert all(each == sorted(each, reverse=True) for each in losses.values())
    if first["targets"] <= rank.TOKENS_EACH:
        tokens = [each for each in own["tokens"] if each["document"] == first["document"]]
        assert sum(each["share"] for each in tokens) == pytest.approx(first["share"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_find_the_same_shares(layout, made, own, capsys):
    n_ranks, *overrides = LAYOUTS[layout]
    code, report = blame(made / "run", 4, capsys, *overrides, "--ranks", str(n_ranks))
    assert code == 0
    assert shares_in(report) == pytest.approx(shares_in(own), rel=1e-4, abs=1e-6)
    for ours, theirs in zip(report["tokens"], own["tokens"], strict=True):
        assert ours["share"] == pytest.approx(theirs["share"], rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_planted_a_pass_that_sees_more_than_the_document_is_noticed(made, capsys, monkeypatch):
    monkeypatch.setattr(commands, "blame_here", see_another_document)
    _, report = blame(made / "run", 1, capsys, "--from", "0", "parallel.ep=1", "--ranks", "1")
    assert abs(report["sum_of_shares"] - 1) > 1e-3
    assert shares_in(report) != pytest.approx(plain_process(load_config(made / "run.yaml")).shares, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_planted_a_pass_that_leaves_a_trace_is_noticed(made, capsys, monkeypatch):
    """The record does not come out where a pass's gradient is not dropped."""
    monkeypatch.setattr(commands, "blame_here", keep_gradients)
    code, report = blame(made / "run", 4, capsys)
    assert code == 1 and report["first_difference"]["step"] == 4


def test_the_list_it_writes_is_one_that_branch_takes(made, own, tmp_path, capsys):
    config = load_config(made / "run.yaml")
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    documents = find_listed(dataset.document_names, read_list(own["list"], "--without"), "--without")
    assert {each.document for each in documents} == {row["document"] for row in own["documents"][:2]}
    arguments = [str(made / "run"), str(tmp_path / "new"), "--step", "4", "--without", own["list"]]
    assert main(["branch", *arguments]) == 0
    assert load_config(tmp_path / "new/config.yaml").data.without == str(tmp_path / "new/without.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_the_shares_add_up_within_the_precision(precision, tmp_path, capsys):
    config = write_config(tmp_path, write_tokens(tmp_path), "run", precision=precision, steps=3, zero=2)
    train(config, 2)
    code, report = blame(tmp_path / "run", 3, capsys)
    assert code == 0 and report["sum_of_shares"] == pytest.approx(1, abs=0.02)


REFUSED = {
    "a step not reached": (["--step", "5"], "--step=5 was not reached in"),
    "no such checkpoint": (["--step", "4", "--from", "3"], "--from=3 must be 0 or the step of a checkpoint before"),
    "a layout that does not fit": (["--step", "4", "parallel.tp=3", "--ranks", "3"], "parallel.tp=3 must divide"),
    "another setting": (["--step", "4", "optimizer.lr=1.0"], "optimizer.lr=1.0 must stay"),
    "a list in the run": (["--step", "4", "--leave-out", "RUN/x.jsonl"], "must lie outside the run directory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_take_a_line_and_create_nothing(case, made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, expected = REFUSED[case]
    before = files_of(made)
    assert main(["blame", str(made / "run"), *[each.replace("RUN", str(made / "run")) for each in arguments]]) == 2
    told = capsys.readouterr()
    assert expected in told.err.splitlines()[0] and told.out == ""
    assert files_of(made) == before and list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_gone_is_refused(made, tmp_path, capsys):
    shutil.copytree(made / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000002")
    assert main(["blame", str(tmp_path / "run"), "--step", "4"]) == 2
    assert "needs a checkpoint from before it" in capsys.readouterr().err


def test_what_is_not_finite_comes_first():
    losses = {"a": (1.0, 2.0, 2.0), "b": (np.nan, np.nan, np.nan), "c": (3.0, 2.0, 2.0), "d": (1.0, np.inf, np.inf)}
    documents = [DocumentBlamed(Document(name, (0, 3), ()), 2, Measured(*each)) for name, each in losses.items()]
    ranked = [each.document.name for each in rank_documents(documents, Measured(5.0, 4.0, 2.0))]
    assert set(ranked[:2]) == {"b", "d"} and ranked[2:] == ["c", "a"]  # the gradients are alike


def test_a_document_is_blamed_for_what_its_batch_would_be_without_it():
    """Of two documents of three, by hand: losses 2 and 7 nats over 1 and 2 targets, gradients (3, 0) and (1, 4)."""
    whole = Measured(9.0, 32.0, 32**0.5)  # (4, 4)
    long = DocumentBlamed(Document("long", (0, 3), ()), 2, Measured(7.0, 20.0, 17**0.5))
    short = DocumentBlamed(Document("short", (3, 5), ()), 1, Measured(2.0, 12.0, 3.0))
    assert rank.loss_without(long, whole, 3) == pytest.approx(2.0) and rank.loss_without(short, whole, 3) == 3.5
    assert rank.grad_norm_without(long, whole, 3) == pytest.approx(
        9.0
    )  # three times as far, over a third of the targets
    assert rank.grad_norm_without(short, whole, 3) == pytest.approx(17**0.5 * 3 / 2)
    assert rank.blame_of(long, whole, 3) == pytest.approx(1 - 2 / 3)  # its norm would be larger
    assert rank.blame_of(short, whole, 1) == 1.0  # nothing is left without it


def test_length_alone_is_no_blame():
    """A document of nine tenths of the batch that costs what the others do, beside a short one that costs more."""
    whole = Measured(100.0 + 20.0, 1.0, 1.0)
    long = DocumentBlamed(Document("long", (0, 90), ()), 90, Measured(90.0, 0.5, 0.7))
    short = DocumentBlamed(Document("short", (90, 95), ()), 5, Measured(20.0, 0.4, 0.7))
    others = DocumentBlamed(Document("others", (95, 100), ()), 10, Measured(10.0, 0.1, 0.3))
    assert rank_documents([long, short, others], whole)[0] is short


def test_hostile_text_is_shown_as_text(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    hostile = "\x1b[2J[bold]\u202e\x07"
    measured = Measured(1.0, 1.0, 1.0)
    blamed = Blamed(
        measured,
        [DocumentBlamed(Document(f"s/{hostile}:3", (0, 3), (Part(0, 0, 3),)), 2, measured)],
        None,
        [TokenBlamed("s/x:3", 0, 0, 5, 4, measured)],
    )
    row = document_row(blamed.documents[0], blamed, hostile)
    token = {"document": "x", "position": 0, "token": 1, "before": 2, "loss": 1.0, "share": 1.0}
    report = {
        "run": hostile,
        "step": 1,
        "from": 0,
        "steps": [{"exact": True, "bounds": {"loss": 0.0, "grad_norm": 0.0}}],
        "first_difference": None,
        "notes": [hostile],
        "loss": 1.0,
        "grad_norm": 1.0,
        "documents": [row],
        "auxiliary_share": None,
        "sum_of_shares": float("nan"),
        "tokens": [token | {"text": hostile, "text_before": hostile}],
    }
    print_report(as_json(report))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
    assert "[bold]" in shown and "\\x1b[2J" in shown
