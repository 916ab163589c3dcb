"""Granite 3 (IBM, 2024): Llama with factors on embeddings, scores, residuals and logits."""

from modeling.families.family import Family, Key
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    FEED_FORWARD,
    FEED_FORWARD_BIAS,
    FEED_FORWARD_KEYS,
    O_BIAS,
    QKV_BIAS,
)

MULTIPLIERS: dict[str, str | Key] = {
    "attention_multiplier": Key(
        ours=("score_scale",),
        write=lambda config: config.head_dim**-0.5 if config.score_scale is None else config.score_scale,
        read=lambda factor: {"score_scale": factor},
    ),
    "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_divisor",
    "residual_multiplier": "residual_scale",
}

FAMILY = Family(
    architecture="GraniteForCausalLM",
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **O_BIAS, **FEED_FORWARD, **FEED_FORWARD_BIAS},
    keys={
        **DECODER_KEYS,
        **FEED_FORWARD_KEYS,
        **MULTIPLIERS,
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": "ff_bias",
    },
    constants=DECODER_CONSTANTS,
    ignored={},
    defaults={
        **DECODER_DEFAULTS,
        **dict.fromkeys(MULTIPLIERS, 1.0),
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "vocab_size": 32000,
    },
    equal=EQUAL_BIASES,
    # models/granite: d_model / n_heads channels a head; only causal masks.
    allowed={"d_head": (None,)},
    published={},
)
