"""Ten documents of noise among those that a run has learnt: each is blamed for its step; a branch never sees them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from command_runs import numbers, train, updates, write_config
from data.dataset import Dataset
from data.opened import Source
from data.spans import spans_of
from data.tokenfile import TokenFile
from data_reference import write_token_file
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.load import load_config
from launcher.config.tree import CheckpointConfig
from launcher.training.start import start_training
from launcher.watch.metrics import read_metrics
from layout_runs import MOE_MODEL, VOCAB_SIZE
from modeling.optimizers.config import SGDConfig
from parallel.checkpoint.read import open_checkpoint

STEPS, FIRST, N_POISONED = 60, 32, 10  # steps; none before FIRST sees a poisoned document
SEQ_LEN, BATCH = 24, 8
LEARNT = 12  # ids, each followed by the next one
AGAIN = 33  # as many steps after the branch as a proof has
# prove's, of weights, and of losses and norms, relative. What is below 1 here, where a proof's losses are not, is the
# difference of larger numbers (the target's logit and their logsumexp), whose rounding does not shrink with it.
BOUND = 1e-6
LAYOUTS = {
    "tp2 ep2": ["parallel.tp=2", "parallel.ep=2"],
    "cp2": ["parallel.cp=2"],
    "zero3": ["parallel.zero=3"],
    "pp2": ["parallel.pp=2"],
}


@dataclasses.dataclass
class Run:
    folder: Path
    poisoned: dict[int, str]  # step -> the document


def documents() -> list[list[int]]:
    """Of the cycle of LEARNT ids, each from another place on."""
    draw, found = np.random.default_rng(0), []
    while sum(map(len, found)) < STEPS * BATCH * SEQ_LEN + 2:  # one epoch
        begin = int(draw.integers(0, LEARNT))
        found.append([1 + (begin + place) % LEARNT for place in range(int(draw.integers(6, 14)))])
    return found


def choose_poisoned(prefix: Path) -> dict[int, int]:
    """Of ten steps a document each, that lies in one sample, in the middle of its row."""
    file = TokenFile(prefix)
    source = Source(1.0, (file,), trusted=True, name="tokens")
    dataset = Dataset([source], seq_len=SEQ_LEN, seed=0, vocab_size=VOCAB_SIZE, shuffled=True)
    chosen = {}
    for step in range(FIRST, STEPS, 3)[:N_POISONED]:
        for span in spans_of(dataset, np.arange((step - 1) * BATCH, step * BATCH)):
            if (span.first, span.stop) == file.document_range(span.document) and span.stop % SEQ_LEN:
                chosen[step] = span.document
    return chosen


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    folder, draw = tmp_path_factory.mktemp("poison"), np.random.default_rng(1)
    clean = documents()
    chosen = choose_poisoned(Path(write_token_file(folder / "tokens", clean)))
    assert len(chosen) == N_POISONED
    for number in chosen.values():
        clean[number] = draw.integers(LEARNT + 1, VOCAB_SIZE, len(clean[number])).tolist()
    prefix = str(write_token_file(folder / "tokens", clean))
    options = {"model": MOE_MODEL, "optimizer": SGDConfig(lr=0.2, momentum=0.9, clip_norm=1.0)}
    path = write_config(folder, prefix, "run", steps=STEPS, global_batch_size=BATCH, **options)
    config = dataclasses.replace(load_config(path), checkpoint=CheckpointConfig(every_steps=10, keep_last=100))
    path.write_text(dump_config(config))
    rows = train(path, 1)
    assert rows[FIRST - 2]["loss"] < rows[0]["loss"] / 3, "the run has not learnt its documents"
    return Run(folder, {step: f"tokens/tokens:{number}" for step, number in chosen.items()})


@pytest.mark.slow
def test_each_poisoned_document_is_first_in_its_batch(run, capsys):
    found = {}
    for step in run.poisoned:
        capsys.readouterr()
        assert main(["blame", str(run.folder / "run"), "--step", str(step), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["sum_of_shares"] == pytest.approx(1, abs=1e-5)
        found[step] = [(row["document"], row["blame"], row["share"], row["loss"]) for row in report["documents"][:3]]
    first = {step: rows[0][0] for step, rows in found.items()}
    assert first == run.poisoned, found


@pytest.fixture(scope="module")
def never(run) -> list[dict]:
    """The rows of a run whose config leaves the documents out from its first step on; it was resumed after step 33."""
    listed = run.folder / "list.jsonl"
    listed.write_text("".join(json.dumps({"document": name}) + "\n" for name in run.poisoned.values()))
    base = load_config(run.folder / "run.yaml")
    data = dataclasses.replace(base.data, without=str(listed))
    config = dataclasses.replace(base, data=data, run_dir=str(run.folder / "never"), name="never")
    path = run.folder / "never.yaml"
    path.write_text(dump_config(config))
    train(path, 1, f"train.steps={AGAIN}")
    return train(path, 1)


def branch(run: Run, new: Path) -> None:
    listed = str(run.folder / "list.jsonl")
    assert main(["branch", str(run.folder / "run"), str(new), "--step", "60", "--without", listed]) == 0
    assert json.loads((new / "branched_from.json").read_text())["step"] == 30


def rows_of(run_path: Path) -> list[dict]:
    return [row for row in read_metrics(run_path / "metrics.jsonl") if "loss" in row]


@pytest.mark.slow
def test_a_branch_without_them_is_a_run_that_never_saw_them_bit_for_bit(run, never, tmp_path):
    """From step 30 to 60, nine poisoned batches, on one process as the other."""
    branch(run, tmp_path / "new")
    assert start_training(tmp_path / "new/config.yaml", [], 1) == 0
    found = rows_of(tmp_path / "new")
    assert [row["step"] for row in found] == list(range(31, STEPS + 1)) and numbers(found) == numbers(never[30:])
    ours, theirs, seen = (
        weights_of(each, STEPS) for each in (tmp_path / "new", run.folder / "never", run.folder / "run")
    )
    assert farthest(ours, theirs) == 0
    assert farthest(ours, seen) > 1000 * BOUND  # the run that saw them is another
    assert numbers(updates(run.folder / "run.yaml")[30:]) != numbers(found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_another_layout_it_is_that_run_within_the_proofs_bounds(layout, run, never, tmp_path):
    """As many steps as a proof has, from step 30 on; the second batch is a poisoned one."""
    branch(run, tmp_path / "new")
    assert start_training(tmp_path / "new/config.yaml", [*LAYOUTS[layout], f"train.steps={AGAIN}"], 2) == 0
    for ours, theirs in zip(rows_of(tmp_path / "new"), never[30:AGAIN], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        for key in ("loss", "grad_norm"):
            assert abs(ours[key] - theirs[key]) <= BOUND * max(1.0, abs(theirs[key])), (ours["step"], key)
    assert farthest(weights_of(tmp_path / "new", AGAIN), weights_of(run.folder / "never", AGAIN)) <= BOUND


def weights_of(run_path: Path, step: int) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(str(run_path / f"checkpoints/step-{step:08}"))
    return {name: checkpoint.read(name).numpy() for name in checkpoint.names()}


def farthest(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)
