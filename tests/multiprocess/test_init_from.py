"""A run that begins with another's weights, on another layout, trains as one plain process that begins with them."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from command_runs import ENVIRONMENT, command, train, write_config
from launcher.cli import main
from launcher.config.load import load_config
from launcher.errors import UserError
from launcher.prove.reference import ReferenceTrainer
from launcher.watch.metrics import read_metrics
from layout_runs import MOE_MODEL, run_reference, write_tokens
from modeling.moe_config import BiasBalance
from modeling.optimizers.config import SGDConfig
from parallel.checkpoint.read import open_checkpoint
from parallel.config import ParallelConfig

BIAS_MODEL = dataclasses.replace(MOE_MODEL, moe=dataclasses.replace(MOE_MODEL.moe, balance=BiasBalance(rate=0.01)))
SGD = SGDConfig(lr=0.5, momentum=0.9, clip_norm=0.5)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A run of four AdamW steps on two ranks, its biases moved; checkpoints after 2 and 4."""
    folder = tmp_path_factory.mktemp("source")
    config = write_config(folder, write_tokens(folder), "source", model=BIAS_MODEL, zero=1, steps=4)
    train(config, 2)
    return folder / "source"


@pytest.fixture(scope="module")
def other_tokens(tmp_path_factory) -> str:
    return write_tokens(tmp_path_factory.mktemp("other"), seed=1)


def begin(source: Path, tokens: str, folder: Path, name: str, **changes) -> Path:
    """A config that begins with the source's weights, on other data with another optimizer."""
    path = write_config(folder, tokens, name, **{"model": BIAS_MODEL, "optimizer": SGD, "steps": 3, **changes})
    path.write_text(path.read_text().replace("init_from: null", f"init_from: {source}"))
    return path


def reference_from(monkeypatch, checkpoint: Path, config: Path):
    """The config's updates by one plain process from the checkpoint's weights."""
    held = open_checkpoint(checkpoint)
    make = ReferenceTrainer.__init__

    def with_weights(self, *arguments, **options):
        make(self, *arguments, **options)
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(held.read(name))
                self.masters[name].copy_(held.read(name))
            for name, buffer in self.model.named_buffers():
                buffer.copy_(held.read(name, "buffer"))

    monkeypatch.setattr(ReferenceTrainer, "__init__", with_weights)
    return run_reference(load_config(config))


LAYOUTS = {
    "zero0": (2, ParallelConfig(zero=0)),
    "zero3": (2, ParallelConfig(zero=3)),
    "tp2 pp2": (4, ParallelConfig(tp=2, pp=2, zero=1)),
    "cp2 ep2 zero2": (2, ParallelConfig(cp=2, ep=2, zero=2)),
}


FAST = "zero3"


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in LAYOUTS]
)
def test_other_layouts_train_as_one_plain_process(layout, source, other_tokens, tmp_path, monkeypatch):
    n_ranks, parallel = LAYOUTS[layout]
    config = begin(source, other_tokens, tmp_path, "new", parallel=parallel)
    rows = train(config, n_ranks)
    reference = reference_from(monkeypatch, source / "checkpoints/step-00000004", config)
    for row, expected in zip(rows, reference.rows, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("zero", [2, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (1, 3))])
def test_fp32_masters_are_the_sources_bit_for_bit(zero, source, other_tokens, tmp_path):
    """In bf16; a step of learning rate 0 leaves them as they were."""
    config = begin(
        source, other_tokens, tmp_path, "new", zero=zero, precision="bf16", steps=1, optimizer=SGDConfig(lr=0.0)
    )
    train(config, 2)
    ours, theirs = (
        open_checkpoint(run / f"checkpoints/step-{step:08}") for run, step in ((tmp_path / "new", 1), (source, 4))
    )
    for name in theirs.names():
        assert torch.equal(ours.read(name), theirs.read(name)), name


def test_imported_weights_are_the_masters_bit_for_bit(source, other_tokens, tmp_path):
    """Of a run that was exported, and imported from there; its directory itself trains no further."""
    assert main(["export", str(source), str(tmp_path / "exported")]) == 0
    assert main(["import", str(tmp_path / "exported"), str(tmp_path / "imported")]) == 0
    model = dataclasses.replace(BIAS_MODEL, d_head=BIAS_MODEL.head_dim)  # config.json always says it
    optimizer = SGDConfig(lr=0.0)
    config = begin(tmp_path / "imported", other_tokens, tmp_path, "new", steps=1, model=model, optimizer=optimizer)
    train(config, 2)
    ours, theirs = (
        open_checkpoint(run / f"checkpoints/step-{step:08}") for run, step in ((tmp_path / "new", 1), (source, 4))
    )
    assert [name for name in theirs.names() if not torch.equal(ours.read(name), theirs.read(name))] == []
    with pytest.raises(UserError, match="holds imported or averaged weights"):
        train(config, 1, f"run_dir={tmp_path / 'imported'}", "init_from=null")


@pytest.mark.slow
def test_it_is_on_record_and_ignored_on_resume(source, other_tokens, tmp_path):
    """The config names the checkpoint that was taken; afterwards neither it nor the key's value matters."""
    shutil.copytree(source, tmp_path / "theirs")
    config = begin(tmp_path / "theirs", other_tokens, tmp_path, "new", steps=4)
    whole = train(begin(source, other_tokens, tmp_path, "whole", steps=4), 1)
    train(config, 1, "train.steps=2")
    shutil.rmtree(tmp_path / "theirs")
    for overrides in (["train.steps=3"], ["init_from=null"]):
        rows = train(config, 1, *overrides)
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]
    taken = str(tmp_path / "theirs/checkpoints/step-00000004")
    assert load_config(tmp_path / "new/config.yaml").init_from == taken
    events = [row for row in read_metrics(tmp_path / "new/metrics.jsonl") if "event" in row]
    assert {row["init_from"] for row in events if row["event"] == "start"} == {taken}
    assert not [row for row in events if row["event"] == "config_change" and row["key"] == "init_from"]


@pytest.mark.slow
def test_a_damaged_shard_ends_all_ranks_in_one_line(source, other_tokens, tmp_path):
    """Its hash is checked while it is read, by all ranks at once."""
    shutil.copytree(source, tmp_path / "theirs")
    for shard in (tmp_path / "theirs/checkpoints/step-00000004").glob("*.safetensors"):
        with shard.open("r+b") as file:
            file.seek(-3, 2)
            file.write(b"bad")
    config = begin(tmp_path / "theirs", other_tokens, tmp_path, "new")
    ended = subprocess.run(command(config, 2), env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    told = ended.stderr.splitlines()
    assert (
        ended.returncode == 2
        and len(told) == 1
        and told[0].startswith(f"init_from={tmp_path}/theirs/checkpoints/step-00000004 is damaged (")
    )


def test_planted_other_weights_are_seen(source, other_tokens, tmp_path, monkeypatch):
    """The checkpoint before the one that was taken gives other losses."""
    config = begin(source, other_tokens, tmp_path, "new")
    rows = train(config, 1)
    reference = reference_from(monkeypatch, source / "checkpoints/step-00000002", config)
    assert abs(rows[0]["loss"] / reference.rows[0]["loss"] - 1) > 1e-4
