"""GLM-4 of 2024 (arXiv:2406.12793): Llama with biases of q, k and v, of whose heads a part turns, by neighbours."""

from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    GATE_UP,
    HEAD_KEYS,
    PAIRED,
    PAIRED_BIAS,
    QKV_BIAS,
)

FAMILY = Family(
    architecture="GlmForCausalLM",
    weights={
        **DECODER,
        **ATTENTION,
        **PAIRED,
        **QKV_BIAS,
        **PAIRED_BIAS,
        **FEED_FORWARD,
        **GATE_UP,
    },
    keys={**DECODER_KEYS, **HEAD_KEYS, **FEED_FORWARD_KEYS, "attention_bias": "qkv_bias"},
    constants=DECODER_CONSTANTS,
    ignored={},
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": True,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
        "vocab_size": 151552,
    },
    # models/glm: only causal masks; o_proj has no bias; of the channels that turn, (2c, 2c + 1) are a pair.
    allowed={},
    turns_a_part=True,
    published={},
)
