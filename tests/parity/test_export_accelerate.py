"""Exports in accelerate's `load_checkpoint_and_dispatch`: it takes ours wherever it takes transformers' own save.

An empty model is built from the folder's config.json, and accelerate fills it from the folder's files, by the names of
the modules alone. transformers 5 keeps a layer's experts in one tensor and saves them one by one, so accelerate can
read neither its saves nor ours of models with experts; in version 4 it reads both (test_model_transformers4.py). Logits
are those of transformers' own loading, bit for bit: the same class, weights and operations.
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import launcher.commands.export
from dispatched import dispatched
from launcher.commands.export import SHARD_BYTES, write_export
from modeling.config import FAMILIES, FamilyName
from modeling.families.weights import to_hf
from rotating import some_fast
from small_models import MOE_FAMILIES, build, example_config, tensors_of

SMALL_BYTES = 20_000  # of a file
TOKENS_BS = torch.arange(40).view(2, 20)


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    transformers_logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def collecting_garbage_is_cheap() -> None:
    """accelerate collects after each file: all that tests before these have left would be looked through each time."""
    gc.collect()
    gc.freeze()


def exported(family: FamilyName, out: Path, *, tied: bool = False, shard_bytes: int = SHARD_BYTES) -> Any:
    """transformers' own model of an export of ours, which is in ``out``."""
    config = example_config(family, tie_embeddings=tied)
    write_export(tensors_of(build(config, 3)).items(), config, 64, None, out, shard_bytes=shard_bytes)
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=False)


@pytest.mark.parametrize(
    ("tied", "shard_bytes"), [(False, SHARD_BYTES), (True, SMALL_BYTES)], ids=["", "tied, in shards"]
)
@pytest.mark.parametrize("family", some_fast(FAMILIES, "llama", "gpt2"))
def test_accelerate_loads_ours_where_it_loads_theirs(
    family: FamilyName, tied: bool, shard_bytes: int, tmp_path: Path
) -> None:
    theirs = exported(family, tmp_path / "ours", tied=tied, shard_bytes=shard_bytes)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) > 1) == (shard_bytes == SMALL_BYTES)
    expected, their_warnings = dispatched(tmp_path / "theirs", TOKENS_BS)
    if expected is None:
        assert family in {*MOE_FAMILIES, "gpt_neox"}  # experts in a tensor each, a head of another name: theirs too
        return
    ours, our_warnings = dispatched(tmp_path / "ours", TOKENS_BS)
    assert our_warnings == their_warnings == []
    with torch.no_grad():
        reference = theirs.eval()(TOKENS_BS, use_cache=False).logits
    assert ours is not None and torch.equal(ours, expected) and torch.equal(ours, reference)


def test_planted_another_name_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(config: Any, tensors: Any) -> Iterator[tuple[str, Tensor]]:
        return ((name.replace("o_proj", "out_proj"), tensor) for name, tensor in to_hf(config, tensors))

    monkeypatch.setattr(launcher.commands.export, "to_hf", renamed)
    exported("llama", tmp_path / "ours")
    loaded, warnings = dispatched(tmp_path / "ours", TOKENS_BS)
    assert loaded is None and "out_proj" in warnings[0]
