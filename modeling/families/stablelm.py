"""StableLM (Stability AI, arXiv:2402.17834): Llama with a layer norm, of whose heads a part turns."""

from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    NORM_BIAS,
    QKV_BIAS,
)

FAMILY = Family(
    architecture="StableLmForCausalLM",
    weights={
        **DECODER,
        **ATTENTION,
        **QKV_BIAS,
        **FEED_FORWARD,
        **NORM_BIAS,
    },
    keys={
        **{key: ours for key, ours in DECODER_KEYS.items() if key != "rms_norm_eps"},
        **FEED_FORWARD_KEYS,
        "layer_norm_eps": "norm_eps",
        "use_qkv_bias": "qkv_bias",
    },
    constants={
        **DECODER_CONSTANTS,
        "hidden_dropout": 0.0,  # of what the feed-forward layer puts out alone
        "qk_layernorm": False,  # a layer norm of its own for each head
        "use_parallel_residual": False,  # with one norm for attention and feed-forward layer
    },
    ignored={},
    defaults={
        **DECODER_DEFAULTS,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "layer_norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": False,
        "vocab_size": 50304,
    },
    # models/stablelm: d_model / n_heads channels a head; only causal masks.
    allowed={"d_head": (None,), "norm": ("layer",)},
    turns_a_part=True,
    published={},
)
