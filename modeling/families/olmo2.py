"""OLMo 2 (arXiv:2501.00656): a dense decoder that norms its blocks' outputs, and queries and keys over all heads."""

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
)

POST_NORMS = {
    "layers.{layer}.attention_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.{layer}.feed_forward_norm.weight": "model.layers.{layer}.post_feedforward_layernorm.weight",
}

FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    weights={**DECODER, **POST_NORMS, **ATTENTION, **QKV_BIAS, **O_BIAS, **QK_NORM, **FEED_FORWARD},
    keys={**DECODER_KEYS, **FEED_FORWARD_KEYS, "attention_bias": ATTENTION_BIAS},
    constants=DECODER_CONSTANTS,
    ignored={},
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "vocab_size": 50304,
    },
    equal=EQUAL_BIASES,
    rope_scalings=(),  # version 4 of the class refuses all kinds but two that 5 writes otherwise
    # models/olmo2: Olmo2DecoderLayer norms the outputs of attention and mlp; q_norm and k_norm are always there.
    allowed={"d_head": (None,), "norm_placement": ("post",), "qk_norm": (True,), "qk_norm_over": ("all_heads",)},
    published={
        "OLMo-2-1124-7B": ModelConfig(
            family="olmo2",
            vocab_size=100352,
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=32,
            d_ff=11008,
            norm_placement="post",
            qk_norm=True,
            qk_norm_over="all_heads",
            rope_theta=500000.0,
        ),
    },
)
