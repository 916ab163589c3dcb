"""Mistral (arXiv:2310.06825): a dense decoder, with a sliding window in every layer if wanted."""

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    WINDOW,
)

FAMILY = Family(
    architecture="MistralForCausalLM",
    weights={**DECODER, **ATTENTION, **FEED_FORWARD},
    keys={**DECODER_KEYS, **HEAD_KEYS, **FEED_FORWARD_KEYS, "sliding_window": "sliding_window"},
    constants=DECODER_CONSTANTS,
    ignored={},
    defaults={
        **DECODER_DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "vocab_size": 32000,
    },
    # models/mistral: one mask for all layers, sliding where sliding_window is set.
    allowed={},
    at_least=WINDOW,
    published={
        "Mistral-7B-v0.1": ModelConfig(
            family="mistral",
            vocab_size=32000,
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            d_ff=14336,
            sliding_window=4096,
            norm_eps=1e-5,
        ),
    },
)
