"""Nemotron-4 (arXiv:2402.16819) and Minitron: layer norms that add one, no gates, half of a head's channels turn."""

from modeling.families.family import Family
from modeling.families.shared import (
    ACTIVATION,
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    NORM_BIAS,
    O_BIAS,
    QKV_BIAS,
    UNGATED,
)

FAMILY = Family(
    architecture="NemotronForCausalLM",
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **O_BIAS, **UNGATED, **NORM_BIAS},
    keys={
        **{key: ours for key, ours in DECODER_KEYS.items() if key != "rms_norm_eps"},
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        "attention_bias": ATTENTION_BIAS,
        "hidden_act": ACTIVATION,
        "mlp_bias": "ff_bias",
        "norm_eps": "norm_eps",
        "num_key_value_heads": "n_kv_heads",  # the class fails where it is null
    },
    constants={},
    ignored={},
    # of files older than the class, which does not read them
    passed_over=frozenset({"rope_percent", "rope_percentage"}),
    same={"rope_percent": "partial_rotary_factor", "rope_percentage": "partial_rotary_factor"},
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "hidden_act": "relu2",
        "hidden_size": 6144,
        "initializer_range": 0.0134,
        "intermediate_size": 24576,
        "mlp_bias": False,
        "norm_eps": 1e-5,
        "num_attention_heads": 48,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "partial_rotary_factor": 0.5,
        "vocab_size": 256000,
    },
    # models/nemotron: NemotronLayerNorm1P adds one to its weights, and NemotronMLP has no gate.
    allowed={"ff_gated": (False,), "norm": ("layer",), "norm_adds_one": (True,)},
    equal=EQUAL_BIASES,
    turns_a_part=True,
    rope_scalings=(),  # version 4 of the class computes plain frequencies whatever rope_scaling says
    published={},
)
