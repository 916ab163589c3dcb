"""Runs that leave documents out, under every axis, against one plain process that is never given them.

The plain process reads the whole data, and each row has the tokens of the left-out documents cut from it, the rest
moved together, before the model sees it: nothing of how the ranks leave them out is used.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from data.batch import IGNORED, PADDING
from data.dataset import Dataset, open_dataset
from data.order import take
from data.spans import document_name, spans_of
from data.without import LeftOutParts
from launcher.config.tree import RunConfig
from launcher.prove.reference import PlainBatch, ReferenceTrainer
from layout_runs import MOE_MODEL, LayoutResult, largest_error, run_config, run_layout, write_tokens
from parallel.config import ParallelConfig
from rotating import some_fast

BOUND = 1e-6  # as in test_layouts.py
EMPTY_SAMPLES = (2, 3, 8)  # of which every document is left out: two of one micro-batch, and one
LAYOUTS = {
    "one process": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "ep2": (2, {"ep": 2}),
    "cp2": (2, {"cp": 2}),
    "ring": (2, {"cp": 2, "cp_attention": "ring"}),
    "pp2": (2, {"pp": 2}),
    "zero3": (2, {"zero": 3}),
    "tp2 ep2 dp2": (4, {"tp": 2, "ep": 2}),
}


@dataclasses.dataclass
class Made:
    config: RunConfig  # with data.without
    names: set[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Made:
    """Every fourth document, and all of some samples."""
    folder = tmp_path_factory.mktemp("made")
    config = run_config(write_tokens(folder))
    dataset = open_whole(config)
    names = {document_name(dataset, 0, number) for number in range(0, 60, 4)}
    names |= {document_name(dataset, span.file, span.document) for span in spans_of(dataset, np.array(EMPTY_SAMPLES))}
    assert len(names) < 35
    without = write_list(folder / "without.jsonl", names)
    return Made(dataclasses.replace(config, data=dataclasses.replace(config.data, without=without)), names)


def write_list(path: Path, names: set[str]) -> str:
    path.write_text("".join(f'{{"document": "{name}"}}\n' for name in sorted(names)))
    return str(path)


def open_whole(config: RunConfig) -> Dataset:
    data = dataclasses.replace(config.data, without=None)
    return open_dataset(data, seed=config.seed, vocab_size=config.model.vocab_size, split="train")


def without(dataset: Dataset, names: set[str], indices: np.ndarray) -> PlainBatch:
    """The samples with the documents cut out, and padding at the ends."""
    batch = dataset.read(indices)
    rows = [each.copy() for each in (batch.tokens_BS, batch.targets_BS, batch.positions_BS, batch.documents_BS)]
    stays_BS = rows[3] != PADDING
    places = {int(sample): row for row, sample in enumerate(indices)}
    starts = dataset.windows(indices)[1]
    for span in spans_of(dataset, indices):
        if document_name(dataset, span.file, span.document) in names:
            row = places[span.sample]
            stays_BS[row, span.first - starts[row] : span.stop - starts[row]] = False
    cut = []
    for each, filling in zip(rows, (0, IGNORED, 0, PADDING), strict=True):
        made = np.full_like(each, filling)
        for row, stays in enumerate(stays_BS):
            made[row, : stays.sum()] = each[row, stays]
        cut.append(torch.from_numpy(made))
    return PlainBatch(*cut)


def run_plain(made: Made) -> LayoutResult:
    config, dataset = made.config, open_whole(made.config)
    trainer = ReferenceTrainer(config.model, config.optimizer, seed=config.seed, precision="fp32", loss_scale=1.0)
    result, size = LayoutResult([]), config.train.global_batch_size
    for step in range(config.train.steps):
        seen = trainer.step([without(dataset, made.names, take(step * size, size))], config.optimizer.lr)
        result.rows.append({"loss": seen.loss, "grad_norm": seen.grad_norm})
    result.state["weight"] = {name: master.detach() for name, master in trainer.masters.items()}
    result.buffers = dict(trainer.model.named_buffers())
    return result


@pytest.fixture(scope="module")
def plain(made) -> LayoutResult:
    return run_plain(made)


def check(made: Made, plain: LayoutResult, n_ranks: int, micro_batch_size: int = 2, **layout) -> None:
    zero = layout.pop("zero", 1)
    train = dataclasses.replace(made.config.train, micro_batch_size=micro_batch_size)
    config = dataclasses.replace(made.config, parallel=ParallelConfig(zero=zero, **layout), train=train)
    errors = largest_error(run_layout(config, n_ranks), plain)
    assert max(errors.values()) <= BOUND, errors


@pytest.mark.parametrize("layout", some_fast(LAYOUTS, "tp2 ep2 dp2"))
def test_a_run_that_leaves_documents_out_is_one_that_is_never_given_them(layout, made, plain):
    n_ranks, axes = LAYOUTS[layout]
    check(made, plain, n_ranks, **axes)


@pytest.mark.parametrize("layout", some_fast(["one process", "ep2", "pp2", "zero3"], "ep2"))
def test_micro_batches_of_one_sample_may_have_no_token(layout, made, plain):
    n_ranks, axes = LAYOUTS[layout]
    check(made, plain, n_ranks, micro_batch_size=1, **axes)


def test_planted_a_left_out_document_that_is_seen_is_told(made, plain, monkeypatch):
    """One of all that are left out is not."""
    init = LeftOutParts.__init__
    monkeypatch.setattr(LeftOutParts, "__init__", lambda self, files, left=(): init(self, files, left[1:]))
    trained = run_planted(made)
    assert max(largest_error(trained, plain).values()) > BOUND


def run_planted(made: Made) -> LayoutResult:
    """The run's own reading of the data on one plain process, in which a fault can be planted."""
    from layout_runs import run_reference

    return run_reference(made.config)


def test_the_runs_own_reading_on_one_plain_process_passes_without_a_fault(made, plain):
    assert max(largest_error(run_planted(made), plain).values()) <= BOUND


def test_a_batch_of_left_out_documents_alone_changes_nothing(made, tmp_path):
    """It is a step without targets, and has no token to route."""
    config = dataclasses.replace(made.config, train=dataclasses.replace(made.config.train, steps=2))
    dataset = open_whole(config)
    names = {document_name(dataset, span.file, span.document) for span in spans_of(dataset, np.arange(8))}
    path = write_list(tmp_path / "list.jsonl", names)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, without=path), model=MOE_MODEL)
    result = run_layout(dataclasses.replace(config, parallel=ParallelConfig(ep=2)), 2)
    first, second = result.rows
    assert (first["loss"], first["tokens"], first["skipped"]) == (0.0, 0, True)
    assert second["loss"] > 1 and second["tokens"] > 0 and "skipped" not in second
