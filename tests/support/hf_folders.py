"""Folders of small models as Hugging Face transformers itself saves them."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from byte_tokenizer import save_byte_tokenizer
from launcher.cli import main
from launcher.commands.trained import Trained, open_trained
from modeling.config import ModelConfig
from modeling.families.config_json import SpecialTokens, to_config_json

SEQ_LEN = 96


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
