"""Exports in accelerate's `load_checkpoint_and_dispatch`: it takes ours wherever it takes transformers' own save.

An empty model is built from the folder's config.json, and accelerate fills it from the folder's files, by the names of
the modules alone. transformers 5 keeps a layer's experts in one tensor and saves them one by one, so accelerate can
read neither its saves nor ours of models with experts. Logits are those of transformers' own loading, bit for bit: the
same class, weights and operations.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import launcher.commands.export
from launcher.commands.export import SHARD_BYTES, write_export
from modeling.config import FAMILIES, FamilyName
from modeling.families.weights import to_hf
from small_models import MOE_FAMILIES, build, example_config, tensors_of
from warnings_seen import Messages

SMALL_BYTES = 20_000  # of a file


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    transformers_logging.disable_progress_bar()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(40).view(2, 20), use_cache=False).logits


def dispatched(folder: Path) -> tuple[Tensor | None, list[str]]:
    """The logits of the model that accelerate fills; None where it leaves a weight empty. And what it warned of."""
    messages = Messages()
    logger = logging.getLogger("accelerate.utils.modeling")
    logger.addHandler(messages)
    with init_empty_weights():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.tie_weights()
    try:
        model = load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"})
    except (NotImplementedError, ValueError):  # it moves what is empty; a name without a module
        return None, messages.messages
    finally:
        logger.removeHandler(messages)
    is_empty = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return None if is_empty else logits(model), messages.messages


def exported(family: FamilyName, out: Path, *, tied: bool = False, shard_bytes: int = SHARD_BYTES) -> Any:
    """transformers' own model of an export of ours, which is in ``out``."""
    config = example_config(family, tie_embeddings=tied)
    write_export(tensors_of(build(config, 3)).items(), config, 64, None, out, shard_bytes=shard_bytes)
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, trust_remote_code=False)


@pytest.mark.parametrize(
    ("tied", "shard_bytes"), [(False, SHARD_BYTES), (True, SMALL_BYTES)], ids=["", "tied, in shards"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_accelerate_loads_ours_where_it_loads_theirs(
    family: FamilyName, tied: bool, shard_bytes: int, tmp_path: Path
) -> None:
    theirs = exported(family, tmp_path / "ours", tied=tied, shard_bytes=shard_bytes)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    assert (len(list((tmp_path / "ours").glob("*.safetensors"))) > 1) == (shard_bytes == SMALL_BYTES)
    expected, their_warnings = dispatched(tmp_path / "theirs")
    if expected is None:
        assert family in MOE_FAMILIES
        return
    ours, our_warnings = dispatched(tmp_path / "ours")
    assert our_warnings == their_warnings == []
    assert ours is not None and torch.equal(ours, expected) and torch.equal(ours, logits(theirs))


def test_planted_another_name_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(config: Any, tensors: Any) -> Iterator[tuple[str, Tensor]]:
        return ((name.replace("o_proj", "out_proj"), tensor) for name, tensor in to_hf(config, tensors))

    monkeypatch.setattr(launcher.commands.export, "to_hf", renamed)
    exported("llama", tmp_path / "ours")
    loaded, warnings = dispatched(tmp_path / "ours")
    assert loaded is None and "out_proj" in warnings[0]
