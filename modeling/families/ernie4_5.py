"""ERNIE 4.5 without experts (Baidu, 2025): Llama that turns neighbouring channels, with all biases or none."""

from modeling.families.family import Family, Key
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    FEED_FORWARD,
    FEED_FORWARD_BIAS,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    O_BIAS,
    PAIRED,
    PAIRED_BIAS,
    QKV_BIAS,
)

FAMILY = Family(
    architecture="Ernie4_5ForCausalLM",
    weights={
        **DECODER,
        **ATTENTION,
        **QKV_BIAS,
        **O_BIAS,
        **PAIRED,
        **PAIRED_BIAS,
        **FEED_FORWARD,
        **FEED_FORWARD_BIAS,
    },
    keys={
        **{key: ours for key, ours in DECODER_KEYS.items() if key != "attention_dropout"},  # the class drops nothing
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        "use_bias": Key(
            ours=("qkv_bias", "o_bias", "ff_bias"),
            write=lambda config: config.qkv_bias,
            read=lambda has: {"qkv_bias": has, "o_bias": has, "ff_bias": has},
        ),
    },
    constants=DECODER_CONSTANTS,
    ignored={},
    passed_over=frozenset({"attention_dropout"}),
    defaults={
        **DECODER_DEFAULTS,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 18,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_bias": False,
        "vocab_size": 103424,
    },
    equal=(*EQUAL_BIASES, ("qkv_bias", "ff_bias")),
    # models/ernie4_5: only causal masks; channels (2c, 2c + 1) turn; the head has no bias.
    allowed={},
    published={},
)
