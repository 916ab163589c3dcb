"""Loads a model folder by accelerate's `load_checkpoint_and_dispatch`. Imports nothing of Roundtable's."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from warnings_seen import Messages


def dispatched(folder: Path, tokens_BS: Tensor, **options: Any) -> tuple[Tensor | None, list[str]]:
    """The logits (B, S, V) of an empty model filled from the folder's files, and accelerate's warnings.

    The logits are None where a weight stays empty. ``options`` are passed to ``from_config``.
    """
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    from transformers import AutoConfig, AutoModelForCausalLM

    messages = Messages()
    logger = logging.getLogger("accelerate.utils.modeling")
    logger.addHandler(messages)
    with init_empty_weights():
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False, **options)
    model.tie_weights()
    try:
        model = load_checkpoint_and_dispatch(model, folder, device_map={"": "cpu"}).eval()
    except (NotImplementedError, ValueError):  # an empty weight is moved; a name has no module
        return None, messages.messages
    finally:
        logger.removeHandler(messages)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return None, messages.messages
    with torch.no_grad():
        return model(tokens_BS, use_cache=False).logits, messages.messages
