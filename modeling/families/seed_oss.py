"""Seed-OSS (ByteDance, 2025): Llama with a free width of heads, an optional bias of o, and residual dropout."""

from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_BIAS,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    O_BIAS,
    QKV_BIAS,
)

FAMILY = Family(
    architecture="SeedOssForCausalLM",
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **O_BIAS, **FEED_FORWARD, **FEED_FORWARD_BIAS},
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        "attention_bias": "qkv_bias",
        "attention_out_bias": "o_bias",
        "mlp_bias": "ff_bias",
        "residual_dropout": "residual_dropout",
    },
    constants=DECODER_CONSTANTS,
    ignored={},
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 27648,
        "mlp_bias": False,
        "num_attention_heads": 80,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "residual_dropout": 0.1,
        "vocab_size": 155136,
    },
    # models/seed_oss: only causal masks.
    allowed={},
    published={},
)
