"""An export does not show the layout that trained: each file is byte for byte that of one process's checkpoint.

A model with experts trains under a layout and is exported; then one process loads that checkpoint, saves its own, and
that is exported. There is nothing to tolerate: bytes are compared, in fp32, in bf16, and in many small files.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import launcher.commands.export
from export_runs import exported_bytes, save_again, train_and_save
from launcher.commands.trained import Trained
from launcher.config.rules import Precision
from layout_runs import MOE_MODEL, run_config, write_tokens
from modeling.config import ModelConfig
from modeling.logical import logical_shapes
from modeling.moe_config import BiasBalance, SequenceAuxBalance
from modeling.optimizers.config import AdamWConfig
from parallel.config import ParallelConfig
from parallel.pipeline.config import DualPipeV, Interleaved
from small_models import example_config

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("export bytes")]  # its runs take long to make

SMALL, LARGE = 20_000, 5_000_000_000  # bytes of a file
SETTINGS: list[tuple[Precision, int]] = [("fp32", LARGE), ("fp32", SMALL), ("bf16", LARGE), ("bf16", SMALL)]
TP2_PP2_EP2 = ParallelConfig(zero=1, tp=2, pp=2, ep=2)
MOE = dataclasses.replace(MOE_MODEL, vocab_size=320, n_layers=4)
MOE_BIAS = dataclasses.replace(MOE, moe=dataclasses.replace(MOE_MODEL.moe, balance=BiasBalance(rate=0.01)))


def family_model(family: str) -> ModelConfig:
    """Of four layers, whose shapes tp 2 and ep 2 divide."""
    example = example_config(family, vocab_size=320, n_layers=4)
    assert example.moe is not None
    balance = example.moe.balance if example.moe.balance.name == "bias" else SequenceAuxBalance(coefficient=0.05)
    return dataclasses.replace(example, moe=dataclasses.replace(example.moe, balance=balance))


CASES = {  # name -> ranks, layout, model, precision of training
    "tp2 pp2 ep2": (4, TP2_PP2_EP2, MOE_BIAS, "fp32"),
    "tp2 pp2 ep2 dp2": (8, dataclasses.replace(TP2_PP2_EP2, zero=2), MOE_BIAS, "fp32"),
    "bf16": (4, TP2_PP2_EP2, MOE_BIAS, "bf16"),
    "interleaved zero3": (
        4,
        dataclasses.replace(TP2_PP2_EP2, zero=3, pipeline=Interleaved(n_chunks=2)),
        MOE,
        "bf16",
    ),
    "cp2 dualpipev": (8, dataclasses.replace(TP2_PP2_EP2, cp=2, ep=4, pipeline=DualPipeV()), MOE_BIAS, "fp32"),
    **{
        family: (4, TP2_PP2_EP2, family_model(family), "bf16")
        for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
    },
}


@dataclass
class Runs:
    """One run under a layout, and one process's of the same weights."""

    trained: Path
    saved_again: Path


def runs_of(name: str, folder: Path) -> Runs:
    n_ranks, parallel, model, precision = CASES[name]
    micro_batch_size = 1 if n_ranks > 4 else 2
    settings = {"steps": 3, "precision": precision, "micro_batch_size": micro_batch_size}
    config = run_config(
        write_tokens(folder), model=model, optimizer=AdamWConfig(lr=1e-2), parallel=parallel, **settings
    )
    train_and_save(config, n_ranks, folder / "trained")
    save_again(config, ParallelConfig(), folder / "trained", folder / "again")
    return Runs(folder / "trained", folder / "again")


def check_exports(runs: Runs, folder: Path) -> None:
    """Every file of every kind of export of the two is the same."""
    for dtype, shard_bytes in SETTINGS:
        out = folder / f"{dtype}-{shard_bytes}"
        first = exported_bytes(runs.trained, out / "first", dtype, shard_bytes)
        second = exported_bytes(runs.saved_again, out / "second", dtype, shard_bytes)
        n_shards = sum(name.endswith(".safetensors") for name in first)
        assert n_shards == 1 if shard_bytes == LARGE else n_shards > 4
        assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= first.keys()
        assert first.keys() == second.keys()
        assert [name for name, content in first.items() if content != second[name]] == [], (dtype, shard_bytes)


@pytest.fixture(scope="module")
def fast_runs(tmp_path_factory) -> Runs:
    return runs_of("tp2 pp2 ep2", tmp_path_factory.mktemp("fast"))


def test_an_export_is_that_of_one_process(fast_runs: Runs, tmp_path: Path) -> None:
    check_exports(fast_runs, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "tp2 pp2 ep2"])
def test_an_export_is_that_of_one_process_whatever_trained(name: str, tmp_path: Path) -> None:
    check_exports(runs_of(name, tmp_path), tmp_path)


@pytest.mark.slow
def test_planted_another_order_of_tensors_is_seen(
    fast_runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tensors, in files that begin with the last one."""
    whole = exported_bytes(fast_runs.trained, tmp_path / "whole", "fp32", SMALL)
    backwards = dict(reversed(logical_shapes(MOE_BIAS).items()))
    monkeypatch.setattr(launcher.commands.export, "logical_shapes", lambda config: backwards)
    changed = exported_bytes(fast_runs.saved_again, tmp_path / "changed", "fp32", SMALL)
    assert "model.safetensors.index.json" in {name for name in whole if whole[name] != changed.get(name)}


def test_planted_the_last_bit_of_one_element_is_seen(
    fast_runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one expert, in fp32."""
    read = Trained.read

    def planted(trained: Trained, name: str) -> Tensor:
        tensor = read(trained, name)
        if name == "layers.2.feed_forward.experts.down":
            tensor.view(torch.int32)[3, 1, 2] ^= 1
        return tensor

    whole = exported_bytes(fast_runs.trained, tmp_path / "whole", "fp32", LARGE)
    monkeypatch.setattr(Trained, "read", planted)
    changed = exported_bytes(fast_runs.saved_again, tmp_path / "changed", "fp32", LARGE)
    assert [name for name in whole if whole[name] != changed[name]] == ["model.safetensors"]
