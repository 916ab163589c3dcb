"""Jais 2: Arcee with a layer norm, and biases everywhere unless its config says otherwise."""

from dataclasses import replace

from modeling.families.arcee import FAMILY as ARCEE
from modeling.families.shared import NORM_BIAS

FAMILY = replace(
    ARCEE,
    architecture="Jais2ForCausalLM",
    since=5,
    weights={**ARCEE.weights, **NORM_BIAS},
    keys={**{key: ours for key, ours in ARCEE.keys.items() if key != "rms_norm_eps"}, "layer_norm_eps": "norm_eps"},
    defaults={
        **{key: value for key, value in ARCEE.defaults.items() if key != "rms_norm_eps"},
        "attention_bias": True,
        "hidden_size": 3328,
        "intermediate_size": 26624,
        "layer_norm_eps": 1e-5,
        "mlp_bias": True,
        "num_attention_heads": 26,
        "vocab_size": 150272,
    },
    # models/jais2: torch's LayerNorm; Jais2Config itself demands hidden_size % num_attention_heads == 0.
    allowed={**ARCEE.allowed, "norm": ("layer",)},
)
