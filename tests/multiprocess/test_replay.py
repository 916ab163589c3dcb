"""`roundtable replay`: recorded steps of real runs executed again on gloo processes, and what it says of them."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from command_runs import train, updates, write_config
from data.dataset import open_dataset
from health_runs import Plan, run_planned
from launcher.cli import main
from launcher.commands.replay import nudged_here, planned
from launcher.config.load import load_config
from launcher.config.tree import HealthConfig, RunConfig
from launcher.prove.reference import ReferenceTrainer
from launcher.prove.rounding import DRAWS
from launcher.replay import plan, record, seen
from launcher.watch.metrics import read_metrics
from layout_runs import DENSE_MODEL, merge, read, run_config, write_tokens
from modeling.context import PADDING, Context
from modeling.loss import IGNORE
from nudge_runs import nudged
from parallel.config import ParallelConfig
from parallel.processes.start import run_ranks
from rotating import some_fast

pytestmark = pytest.mark.xdist_group("replay")  # the run that its tests share takes long to make

LAYOUTS = {
    "one process": (1, "parallel.ep=1"),
    "other micro-batches": (2, "train.micro_batch_size=1"),
    "zero3": (2, "parallel.zero=3"),
    "tp2": (2, "parallel.tp=2", "parallel.ep=1"),
    "pp2 cp2": (4, "parallel.pp=2", "parallel.cp=2", "parallel.ep=1"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of a run of six AdamW steps of experts on two ranks, with checkpoints after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("made")
    config = write_config(folder, write_tokens(folder), "run", parallel=ParallelConfig(ep=2, zero=1))
    train(config, 2)
    return folder


@pytest.fixture(scope="module")
def own(made, tmp_path_factory) -> dict:
    """The report on step 4 under the run's own layout."""
    folder = tmp_path_factory.mktemp("own")
    before = files_of(made)
    code, report = replay(made / "run", 4, folder)
    assert code == 0 and files_of(made) == before, "something in the run was written"
    return report


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def replay(run: Path, step: int, tmp_path: Path, *arguments: str) -> tuple[int, dict]:
    """The exit code, and the report."""
    code = main(["replay", str(run), "--step", str(step), "--json", str(tmp_path / "report.json"), *arguments])
    return code, json.loads((tmp_path / "report.json").read_text())


def copied(made: Path, tmp_path: Path) -> Path:
    """A copy of the run, which is another run directory with the same record."""
    shutil.copytree(made, tmp_path / "copy")
    return tmp_path / "copy" / "run"


def alter(run: Path, number: int, **changes: float) -> None:
    """Rewrites the row of a step in metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows = [row | changes if row["step"] == number and "loss" in row else row for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_runs_own_layout_comes_out_bit_for_bit(made, own):
    assert own["reproduced"] and own["from"] == 2 and own["layout"]["ranks"] == 2
    rows = {row["step"]: row for row in updates(made / "run.yaml")}
    for step in own["steps"]:
        assert step["exact"] and step["replayed"] == {key: rows[step["step"]][key] for key in step["replayed"]}
    assert [step["step"] for step in own["steps"]] == [3, 4]


def test_the_report_adds_up(own):
    """Documents to the loss, tensors and layers to the norm, experts to the tokens."""
    report, row, documents = own, own["row"], own["documents"]
    n_tokens = sum(each["tokens"] for each in documents)
    total = sum(each["loss"] * each["tokens"] for each in documents if each["tokens"])
    assert total / n_tokens == pytest.approx(row["loss"], rel=1e-6)
    for part in ("gradients", "layers"):
        assert sum(each["grad_norm"] ** 2 for each in report[part]) ** 0.5 == pytest.approx(row["grad_norm"], rel=1e-6)
    steps = {each["step"]: each["replayed"]["tokens"] for each in report["steps"]}
    assert {sum(each["counts"]) for each in report["routers"]} == {2 * (steps[4] - steps[3])}  # top_k of 2
    losses = [each["loss"] for each in report["most_expensive_tokens"]]
    assert losses == sorted(losses, reverse=True) and losses[0] >= row["loss"]


@pytest.mark.parametrize("layout", some_fast(LAYOUTS, "tp2"))
def test_other_layouts_come_out_within_bounds(layout, made, own, tmp_path):
    n_ranks, *overrides = LAYOUTS[layout]
    code, report = replay(made / "run", 4, tmp_path, *overrides, "--ranks", str(n_ranks))
    assert code == 0 and report["reproduced"] and not any(step["exact"] for step in report["steps"])
    assert report["routers"] == own["routers"]
    for ours, theirs in zip(report["documents"], own["documents"], strict=True):
        assert ours["loss"] == (theirs["loss"] and pytest.approx(theirs["loss"], rel=1e-6))
    for ours, theirs in zip(report["gradients"], own["gradients"], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert ours["update_over_weight"] == pytest.approx(theirs["update_over_weight"], rel=1e-4)


def one_process(config) -> dict[str, dict]:
    """The first step by one plain process: each document's mean loss; norms of gradients, weights and updates."""
    trainer = ReferenceTrainer(config.model, config.optimizer, seed=config.seed, precision="fp32", loss_scale=1.0)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")
    indices = np.arange(config.train.batches.size_at(1))
    batch = read(dataset, indices)
    context = Context(batch.positions_BS, batch.documents_BS, has_padding=bool((batch.documents_BS == PADDING).any()))
    with torch.no_grad():
        logits = trainer.model(batch.tokens_BS, context).logits_BSV
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets_BS.flatten(), ignore_index=IGNORE, reduction="none")
    losses, documents = losses.view(batch.targets_BS.shape), {}
    for row, window in enumerate(dataset.documents(indices)):  # documents follow each other in a file
        for place in (batch.targets_BS[row] != IGNORE).nonzero().flatten().tolist():
            document = window["first"] + int(batch.documents_BS[row, place])
            documents.setdefault(document, []).append(float(losses[row, place]))
    before = {name: master.detach().clone() for name, master in trainer.masters.items()}
    step = trainer.step([batch], config.optimizer.lr)
    return {
        "documents": {name: sum(each) / len(each) for name, each in documents.items()},
        "gradients": {name: float(gradient.norm()) for name, gradient in step.gradients.items()},
        "updates": {
            name: float((trainer.masters[name].detach() - old).norm() / old.norm()) for name, old in before.items()
        },
    }


def check_against_one_process(report: dict, config) -> None:
    plain = one_process(config)
    seen_documents = {each["document"]: each["loss"] for each in report["documents"] if each["tokens"]}
    assert seen_documents == pytest.approx(plain["documents"], rel=1e-6)
    assert {each["tensor"]: each["grad_norm"] for each in report["gradients"]} == pytest.approx(
        plain["gradients"], rel=1e-5
    )
    assert {each["tensor"]: each["update_over_weight"] for each in report["gradients"]} == pytest.approx(
        plain["updates"], rel=1e-4
    )


LAYOUT_OF_FIRST_STEP = ("--from", "0", "parallel.tp=2", "parallel.ep=1")


def test_documents_gradients_and_updates_are_one_plain_processes(made, tmp_path):
    _, report = replay(made / "run", 1, tmp_path, *LAYOUT_OF_FIRST_STEP)
    check_against_one_process(report, load_config(made / "run.yaml"))


@pytest.mark.slow
def test_planted_losses_at_their_neighbours_are_seen(made, tmp_path, monkeypatch):
    """The comparison above fails where a token is told the loss of the sample beside it."""
    told = seen.StepSeen.losses_of
    monkeypatch.setattr(seen.StepSeen, "losses_of", lambda self, *rest: np.roll(told(self, *rest), 1, axis=0))
    _, report = replay(made / "run", 1, tmp_path, *LAYOUT_OF_FIRST_STEP)
    with pytest.raises(AssertionError):
        check_against_one_process(report, load_config(made / "run.yaml"))


def test_an_altered_row_is_told_with_what_was_recorded(made, tmp_path, capsys):
    """The last digit of one number: the first step that differs is named."""
    run = copied(made, tmp_path)
    (row,) = [row for row in updates(run.with_suffix(".yaml")) if row["step"] == 3]
    altered = float(np.nextafter(row["loss"], np.inf))
    alter(run, 3, loss=altered)
    code, report = replay(run, 4, tmp_path)
    assert code == 1 and not report["reproduced"]
    found = report["first_difference"]
    assert (found["step"], found["key"], found["recorded"], found["replayed"]) == (3, "loss", altered, row["loss"])
    told = capsys.readouterr()
    assert f"NOT reproduced: step 3: loss is {altered} in the record, {row['loss']} in the replay" in told.out
    lines = [line.strip().partition(" s  ")[2] for line in told.err.splitlines()]
    assert [line for line in lines if line.startswith("step ")] == ["step 3, the last is 4", "step 4, the last is 4"]


@pytest.mark.slow
def test_an_altered_row_beyond_the_bound_is_told_on_another_layout(made, tmp_path):
    run = copied(made, tmp_path)
    (row,) = [row for row in updates(run.with_suffix(".yaml")) if row["step"] == 4]
    alter(run, 4, grad_norm=row["grad_norm"] * (1 + 1e-5))
    code, report = replay(run, 4, tmp_path, "parallel.ep=1", "--ranks", "1")
    assert code == 1 and (report["first_difference"]["step"], report["first_difference"]["key"]) == (4, "grad_norm")


NUDGED = {
    "zero0": (2, ParallelConfig()),
    "zero3 ep2": (2, ParallelConfig(ep=2, zero=3)),
    "tp2 pp2": (4, ParallelConfig(tp=2, pp=2, zero=1)),
}


@pytest.mark.parametrize("layout", some_fast(NUDGED, "tp2 pp2"))
def test_a_weight_is_nudged_alike_on_every_layout(layout, tmp_path):
    """Each to a neighbouring number, by coins of its seed; zeros stay."""
    n_ranks, parallel = NUDGED[layout]
    tokens = write_tokens(tmp_path)
    one = run_config(tokens, zero=1)

    def weights(config: RunConfig, n_ranks: int, seed: int | None) -> dict[str, torch.Tensor]:
        return merge(run_ranks(nudged, n_ranks, config, seed, timeout_seconds=240, threads=1)).state["weight"]

    first, ours, theirs = weights(one, 1, None), weights(run_config(tokens, parallel=parallel), n_ranks, 3), {}
    for seed in (3, 4):
        theirs[seed] = weights(one, 1, seed)
    for name, weight in first.items():
        up, down = (theirs[3][name] == torch.nextafter(weight, torch.tensor(side)) for side in (torch.inf, -torch.inf))
        assert bool((up ^ down)[weight != 0].all()) and not theirs[3][name][weight == 0].any()
        assert weight.numel() < 100 or 0.3 < float(up.float().mean()) < 0.7
        assert torch.equal(ours[name], theirs[3][name])
        assert not weight.any() or not torch.equal(ours[name], theirs[4][name])


def test_rounding_moves_each_draw_otherwise_and_little(made):
    """Eight draws of a well conditioned step, from its checkpoint: of whose masters the ranks compute with."""
    run = made / "run"
    overrides = ("parallel.tp=2", "parallel.ep=1")
    with planned(run, load_config(run / "config.yaml"), 4, overrides, ranks=2, begin=None) as (plan, _):
        draws = run_ranks(nudged_here, 2, plan, timeout_seconds=240, threads=1)[0]
    rows = {row["step"]: row for row in updates(made / "run.yaml")}
    for step in (3, 4):
        losses = [draw[step]["loss"] for draw in draws]
        assert len(draws) == DRAWS and len(set(losses)) > DRAWS // 2
        assert max(abs(loss / rows[step]["loss"] - 1) for loss in losses) < 1e-6


def test_a_changed_token_file_is_told(made, tmp_path, capsys):
    """One id by another, wherever it stands; the file is put back afterwards."""
    tokens = made / "tokens.bin"
    kept = tokens.read_bytes()
    ids = np.frombuffer(kept, np.uint16)
    try:
        tokens.write_bytes(np.where(ids == 17, 18, ids).astype(np.uint16).tobytes())
        code, report = replay(made / "run", 4, tmp_path)
    finally:
        tokens.write_bytes(kept)
    assert code == 1 and report["first_difference"]["key"] in ("loss", "grad_norm")
    assert f"{tokens} was written" in capsys.readouterr().out


@pytest.fixture(scope="module")
def restarted(tmp_path_factory) -> Path:
    """A run on one rank whose second start, from step 2, has batches of other sizes and a lower learning rate."""
    folder = tmp_path_factory.mktemp("restarted")
    config = write_config(folder, write_tokens(folder), "run", model=DENSE_MODEL, steps=2)
    train(config, 1)
    train(config, 1, "train.steps=5", "train.global_batch_size=6", "train.micro_batch_size=3", "optimizer.lr=5e-4")
    return folder


@pytest.mark.parametrize("case", some_fast([(2, 2), (4, 2), (5, 1)], (2, 2)))
def test_each_start_of_a_run_is_replayed_under_its_own_config(case, restarted, tmp_path):
    """Step 2 under the first config, which lies in that start's checkpoint alone; later ones under the second."""
    step, n_steps = case
    code, report = replay(restarted / "run", step, tmp_path)
    assert code == 0 and report["reproduced"] and len(report["steps"]) == n_steps
    assert all(each["exact"] for each in report["steps"])


def test_a_layout_that_an_earlier_starts_batch_does_not_fit_is_refused(restarted, tmp_path, capsys):
    """Step 2 has 8 sequences, which micro-batches of 3, the later start's own, do not divide, and those of 2 do."""
    run, arguments = str(restarted / "run"), ("--step", "3", "--from", "0")
    assert main(["replay", run, *arguments]) == 2
    told = capsys.readouterr().err
    rule = "train.global_batch_size=8 must be a multiple of dp=1 x train.micro_batch_size=3 = 3 in step 2"
    assert told.startswith(f"{rule}, which --step=3 follows from; choose another layout") and told.count("\n") == 1
    assert main(["replay", run, *arguments, "train.micro_batch_size=2"]) == 0
    assert main(["replay", run, "--step", "3", "train.micro_batch_size=4"]) == 2
    assert "= 4; choose another layout, --ranks or train.micro_batch_size" in capsys.readouterr().err


@pytest.mark.slow
def test_planted_the_last_starts_config_for_all_steps_is_seen(restarted, tmp_path, monkeypatch):
    monkeypatch.setattr(plan.ConfigFiles, "of", lambda self, *_: self.own)
    code, report = replay(restarted / "run", 2, tmp_path)
    assert code == 1 and report["first_difference"]["step"] == 1


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory) -> Path:
    """A run on two ranks that meets a bad sample in step 5, goes back to step 4, and leaves out what it had read."""
    folder = tmp_path_factory.mktemp("rolled_back")
    path = write_config(folder, write_tokens(folder), "run", steps=6)
    config = dataclasses.replace(load_config(path), health=HealthConfig(on_nonfinite="rollback"))
    assert run_planned(Plan(poisoned=33), config) == [0, 0]
    events = [row["event"] for row in read_metrics(folder / "run/metrics.jsonl") if "event" in row]
    assert "rollback" in events
    return folder


def test_steps_after_a_rollback_leave_out_what_it_left_out(rolled_back, tmp_path):
    """Step 5 begins at the checkpoint of step 4, which was saved before the rollback and says nothing of it."""
    code, report = replay(rolled_back / "run", 5, tmp_path)
    assert code == 0 and report["from"] == 4 and report["reproduced"]
    assert min(sample for each in report["documents"] for sample in each["samples"]) >= 40


def test_planted_a_rollback_that_is_overlooked_is_seen(rolled_back, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_range_of", lambda row, path: (0, 0))
    code, report = replay(rolled_back / "run", 5, tmp_path)
    assert code == 1 and report["first_difference"]["step"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits_too(precision, tmp_path):
    config = write_config(tmp_path, write_tokens(tmp_path), "run", precision=precision, steps=4, zero=2)
    train(config, 2)
    code, report = replay(tmp_path / "run", 4, tmp_path)
    assert code == 0 and report["steps"][-1]["exact"]
    code, report = replay(tmp_path / "run", 4, tmp_path, "parallel.tp=2")
    assert code == 0 and not report["steps"][-1]["exact"]


REFUSED = {
    "a step not reached": (["--step", "7"], "--step=7 was not reached in"),
    "no such checkpoint": (["--step", "4", "--from", "3"], "--from=3 must be 0 or the step of a checkpoint before"),
    "a layout that does not fit": (["--step", "4", "parallel.tp=3", "--ranks", "3"], "parallel.tp=3 must divide"),
    "another setting": (["--step", "4", "optimizer.lr=1.0"], "optimizer.lr=1.0 must stay 0.001, since a replay"),
    "a setting that no rule allows": (
        ["--step", "4", "model.n_heads=3", "parallel.tp=5"],
        "model.n_heads=3 must stay 4, since a replay",
    ),
    "a file in the run": (["--step", "4", "--html", "RUN/x.html"], "must lie outside the run directory"),
    "one file for two": (["--step", "4", "--json", "x", "--html", "./x"], "--html=./x must not be the file of --json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_take_a_line_and_create_nothing(case, made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, expected = REFUSED[case]
    before = files_of(made)
    arguments = [argument.replace("RUN", str(made / "run")) for argument in arguments]
    assert main(["replay", str(made / "run"), *arguments]) == 2
    told = capsys.readouterr()
    assert expected in told.err.splitlines()[0] and told.out == ""
    assert files_of(made) == before and list(tmp_path.iterdir()) == []


def test_checkpoints_that_are_gone_or_damaged_and_runs_that_are_none_are_refused(made, tmp_path, capsys):
    run = copied(made, tmp_path)
    for step in (2, 4):
        shutil.rmtree(run / f"checkpoints/step-{step:08}")
    assert main(["replay", str(run), "--step", "5"]) == 2
    line = capsys.readouterr().err
    assert "needs a checkpoint from before it" in line and "(after 2, 4) are gone; give --from 0" in line
    assert main(["replay", str(tmp_path), "--step", "5"]) == 2
    assert "must be a run directory" in capsys.readouterr().err
    manifest = run / "checkpoints/step-00000006/manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-10])
    alter(run, 6, step=7)
    assert main(["replay", str(run), "--step", "7"]) == 2
    assert "its checkpoint step-00000006 is damaged" in capsys.readouterr().err
