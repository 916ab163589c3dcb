"""Llama (arXiv:2302.13971): the dense decoder."""

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
)

FAMILY = Family(
    architecture="LlamaForCausalLM",
    weights={**DECODER, **ATTENTION, **FEED_FORWARD},
    keys={**DECODER_KEYS, **HEAD_KEYS, **FEED_FORWARD_KEYS},
    constants={**DECODER_CONSTANTS, "attention_bias": False, "mlp_bias": False},
    ignored={},
    defaults={
        **DECODER_DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "vocab_size": 32000,
    },
    # models/llama: LlamaConfig itself demands hidden_size % num_attention_heads == 0.
    allowed={"qk_norm": (False,), "sliding_window": (None,)},
    heads_divide_d_model=True,
    published={
        "Llama-2-7B": ModelConfig(
            family="llama",
            vocab_size=32000,
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=32,
            d_ff=11008,
            norm_eps=1e-5,
        ),
        "Llama-3-8B": ModelConfig(
            family="llama",
            vocab_size=128256,
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            d_ff=14336,
            rope_theta=500000.0,
            norm_eps=1e-5,
        ),
    },
)
