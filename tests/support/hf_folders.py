"""Folders of small models as Hugging Face transformers itself saves them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from byte_tokenizer import save_byte_tokenizer
from launcher.cli import main
from launcher.commands.trained import Trained, load_decoder, open_trained
from modeling.config import ModelConfig
from modeling.context import Context
from modeling.families.config_json import SpecialTokens, to_config_json

SEQ_LEN = 96
LOGITS_TOLERANCE = 2e-5  # absolute, in fp32: the same operations in another order


def save_hf_model(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype = torch.float32,
    shard: str = "5GB",
    seed: int = 0,
    tokenizer: bool = True,
    special: SpecialTokens | None = None,
) -> PreTrainedModel:
    """Saves transformers' own class of the model, with random weights, to ``folder``; returns the model.

    ``shard`` is the largest size of a file; ``tokenizer``: also save a byte tokenizer.
    """
    logging.disable_progress_bar()
    special = special or (SpecialTokens(eos=0) if tokenizer else SpecialTokens())
    written = to_config_json(config, SEQ_LEN, special, str(dtype).removeprefix("torch."))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written), dtype=dtype, trust_remote_code=False)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # what starts at ones or zeros
                weight += 0.2 * torch.randn(weight.shape)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.2 * torch.randn(buffer.shape)
    model.save_pretrained(folder, max_shard_size=shard)
    if tokenizer:
        save_byte_tokenizer(folder)
    return model


def imported(source: Path, out: Path) -> Trained:
    """Imports the folder ``source`` to the run directory ``out`` with `roundtable import`; returns the opened run."""
    assert main(["import", str(source), str(out)]) == 0
    return open_trained(out)


def loaded(source: Path) -> PreTrainedModel:
    """The model of the folder ``source`` as transformers loads it, in fp32."""
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, trust_remote_code=False).eval()


def difference(source: Path, out: Path) -> float:
    """The largest difference between the logits of transformers' model in ``source`` and ours in ``out``, in fp32.

    Without a cache: its caches have no length where all layers are linear, and its class asks for one.
    """
    trained = open_trained(out)
    generator = torch.Generator().manual_seed(1)
    tokens_BS = torch.randint(trained.config.model.vocab_size, (2, 24), generator=generator)
    positions_BS = torch.arange(24).expand(2, 24)
    ours = load_decoder(trained, "cpu", torch.float32)
    with torch.no_grad():
        theirs_BSV = loaded(source)(tokens_BS, use_cache=False).logits
        ours_BSV = ours(tokens_BS, Context(positions_BS, torch.zeros_like(positions_BS))).logits_BSV
    assert theirs_BSV.std() > 0.05
    return float((theirs_BSV - ours_BSV).abs().max())


def said(config: ModelConfig) -> dict[str, object]:
    """What config.json says of a model: fields that its family does not use are not in it."""
    return to_config_json(config, SEQ_LEN, SpecialTokens(), "float32")


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors in a folder's files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def config_json_of(config: ModelConfig) -> dict[str, Any]:
    """The model's config.json, read back from its text."""
    return json.loads(json.dumps(to_config_json(config, 64, SpecialTokens(eos=5), "bfloat16")))
