"""Llama (arXiv:2302.13971): the dense decoder."""

from typing import Any

from modeling.config import ModelConfig
from modeling.hf.common import DECODER, FEED_FORWARD, decoder_config

ARCHITECTURE = "LlamaForCausalLM"
WEIGHTS = {**DECODER, **FEED_FORWARD}


def family_config(config: ModelConfig) -> dict[str, Any]:
    """config.json without what every model has (modeling.hf.convert.hf_config)."""
    return {**decoder_config(config), "attention_bias": False, "mlp_bias": False}
