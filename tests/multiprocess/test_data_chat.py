"""Training on chats: only the assistant's tokens count, under every layout, and as `transformers` has it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.config import SourceConfig
from data.dataset import open_dataset
from data.masks import Masks
from data.tokenwriter import TokenFileWriter
from launcher.cli import main
from launcher.config.dump import dump_config
from launcher.config.tree import MetricsConfig, RunConfig, WandbConfig
from layout_runs import (
    DENSE_MODEL,
    MOE_MODEL,
    VOCAB_SIZE,
    LayoutResult,
    largest_error,
    read,
    run_config,
    run_layout,
    run_reference,
)
from modeling.families.weights import to_hf
from modeling.mtp_config import MTPConfig
from parallel.config import ParallelConfig

LAYOUTS = {
    "dp": (2, {}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2}),
    "cp": (2, {"cp": 2}),
    "tp x pp x cp": (8, {"tp": 2, "pp": 2, "cp": 2}),
}
PACKINGS = ("sequential", "best_fit", "one_document")


def write_masked(folder: Path, *, n_documents: int = 60, longest: int = 60) -> Path:
    """Ragged random documents: prompts and answers in turn, and some documents without any target."""
    random = np.random.default_rng(3)
    writer = TokenFileWriter(folder / "tokens", np.dtype(np.uint16), has_mask=True)
    for number in range(n_documents):
        n = int(random.integers(2, longest))
        turns = np.repeat(np.arange(n), random.integers(1, 9, size=n))[:n] % 2
        writer.add(random.integers(1, VOCAB_SIZE, size=n), turns.astype(bool) & (number % 7 != 0))
    writer.finish()
    return folder / "tokens"


def a_config(tokens: Path, packing: str = "sequential", parallel: ParallelConfig | None = None, **more) -> RunConfig:
    """Micro-batches of one sequence: some hold no target."""
    config = run_config(str(tokens), parallel=parallel, **{"micro_batch_size": 1, "model": DENSE_MODEL, **more})
    return dataclasses.replace(config, data=dataclasses.replace(config.data, packing=packing))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked")
    tokens = write_masked(folder)
    from data.packed import write_packing

    for packing in PACKINGS[1:]:
        write_packing(tokens, 24, packing)
    return tokens


@pytest.fixture(scope="module")
def references(tokens: Path) -> dict[str, LayoutResult]:
    return {packing: run_reference(a_config(tokens, packing)) for packing in PACKINGS}


def test_some_micro_batches_hold_no_target(tokens: Path) -> None:
    dataset = open_dataset(a_config(tokens).data, seed=0, vocab_size=VOCAB_SIZE, split="train")
    counts = [dataset.count(np.array([number]))[0] for number in range(24)]
    assert 0 in counts and max(counts) > 0
    assert dataset.count(np.arange(24))[0] == sum(counts)


CASES = [
    ("cp", "best_fit"),
    ("dp", "sequential"),
    ("tp", "best_fit"),
    ("pp", "one_document"),
    ("cp", "one_document"),
    ("tp x pp x cp", "best_fit"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "packing"), CASES)
def test_every_layout_counts_the_same_targets(tokens: Path, references, layout: str, packing: str) -> None:
    """Against one plain process: rounding in fp32, three updates of SGD with momentum."""
    n_ranks, axes = LAYOUTS[layout]
    config = a_config(tokens, packing, ParallelConfig(**axes))
    if "x" in layout:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, micro_batch_size=2))
    found = largest_error(run_layout(config, n_ranks), references[packing])
    assert max(found["loss"], found["grad_norm"]) < 1e-5 and found["weight"] < 2e-6, found


@pytest.mark.slow
def test_further_tokens_are_predicted_where_they_are_targets(tokens: Path) -> None:
    """Two modules that look ahead: a prompt's tokens are what they are given, and never what they are to predict."""
    model = dataclasses.replace(MOE_MODEL, mtp=MTPConfig(depth=2))
    config = a_config(tokens, "best_fit", ParallelConfig(cp=2), model=model)
    plain = a_config(tokens, "best_fit", model=model)
    found = run_layout(config, 2), run_layout(plain, 1)
    for row, other in zip(found[0].rows, found[1].rows, strict=True):
        for key in ("loss", "mtp/loss_1", "mtp/loss_2", "grad_norm"):
            assert row[key] == pytest.approx(other[key], rel=1e-5)


def test_loss_and_gradients_are_those_of_transformers(tokens: Path) -> None:
    """One document a sample: no mask of attention, so a plain call with labels of -100 says what they are."""
    from launcher.prove.reference import ReferenceTrainer

    config = a_config(tokens, "one_document")
    dataset = open_dataset(config.data, seed=0, vocab_size=VOCAB_SIZE, split="train")
    batch = read(dataset, np.arange(8))
    trainer = ReferenceTrainer(config.model, config.optimizer, seed=0)
    model = DENSE_MODEL
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=model.d_model,
            num_hidden_layers=model.n_layers,
            num_attention_heads=model.n_heads,
            num_key_value_heads=model.n_kv_heads,
            intermediate_size=model.d_ff,
            rms_norm_eps=model.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
            tie_word_embeddings=False,
        )
    )
    masters = ((name, weight.detach()) for name, weight in trainer.masters.items())
    theirs.load_state_dict(dict(to_hf(model, masters)), strict=True)
    windows = [dataset.read(np.array([number])) for number in range(8)]
    total, n_targets = torch.zeros(()), 0
    for window in windows:
        n = int(window.length_B[0])
        ids = torch.from_numpy(window.window_BW[:, :n].astype(np.int64))
        assert window.is_target_BW is not None
        labels = ids.where(torch.from_numpy(window.is_target_BW[:, :n]), -100)
        counted = int((labels[:, 1:] != -100).sum())
        if counted:
            total = total + theirs(input_ids=ids, labels=labels).loss * counted
            n_targets += counted
    assert n_targets == dataset.count(np.arange(8))[0] > 0
    (total / n_targets).backward()
    seen = trainer.step([batch], lr=0.0)
    assert seen.loss == pytest.approx(float(total.detach()) / n_targets, rel=1e-6)
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    for name, gradient in to_hf(model, seen.gradients.items()):
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-7)


def test_planted_a_layout_that_forgets_the_mask_is_seen(tokens: Path, references, monkeypatch) -> None:
    """In one rank, which suffices: the reference counted the targets, and the layout's run counts all tokens."""
    monkeypatch.setattr(Masks, "of_windows", lambda _, width, file_B, *rest: np.ones((len(file_B), width), bool))
    other = run_reference(a_config(tokens))
    assert abs(other.losses[0] - references["sequential"].losses[0]) > 1e-3


def test_data_show_says_which_tokens_are_targets(tokens: Path, tmp_path: Path, capsys) -> None:
    config = dataclasses.replace(
        a_config(tokens, "best_fit", steps=2),
        run_dir=str(tmp_path / "run"),
        metrics=MetricsConfig(wandb=WandbConfig(mode="disabled")),
    )
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert main(["train", str(tmp_path / "run.yaml"), "--ranks", "1"]) == 0
    capsys.readouterr()
    assert main(["data", "show", str(tmp_path / "run"), "--step", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    dataset = open_dataset(config.data, seed=config.seed, vocab_size=VOCAB_SIZE, split="train")
    indices = np.arange(8, 16)
    batch, file = dataset.read(indices), dataset.files[0]
    found = np.full_like(batch.targets_BS, -100)
    for span in shown["spans"]:
        _, _, first_F, _, offset_F = dataset.fragments(np.array([span["sample"]]))
        row, (first, _) = span["sample"] - 8, span["tokens"]
        place = int(offset_F[list(first_F).index(first)])
        for begin, end in span["targets"]:
            at = place + begin - first - 1
            found[row, at : at + end - begin] = file.tokens[begin:end]
    assert (found == batch.targets_BS).all()
    assert shown["targets"] == (batch.targets_BS >= 0).sum()
    assert main(["data", "show", str(tmp_path / "run"), "--step", "2"]) == 0
    assert "targets" in capsys.readouterr().out


def test_a_source_without_masks_can_be_mixed_with_one_that_has_some(tokens: Path, tmp_path: Path) -> None:
    writer = TokenFileWriter(tmp_path / "plain", np.dtype(np.int32))
    for n in (9, 30, 47):
        writer.add(np.arange(1, n))
    writer.finish()
    config = a_config(tokens)
    sources = (*config.data.sources, SourceConfig(path=str(tmp_path / "plain")))
    data = dataclasses.replace(config.data, sources=sources)
    dataset = open_dataset(data, seed=0, vocab_size=VOCAB_SIZE, split="train")
    indices = np.arange(40)
    batch = dataset.read(indices)
    file_B = dataset.windows(indices)[0]
    assert set(file_B) == {0, 1}
    assert dataset.count(indices)[0] == (batch.targets_BS >= 0).sum()
    of_plain = file_B == 1
    assert batch.next_BS is not None
    assert (batch.targets_BS[of_plain] == batch.next_BS[of_plain]).all()
    assert (batch.targets_BS[~of_plain] != batch.next_BS[~of_plain]).any()
