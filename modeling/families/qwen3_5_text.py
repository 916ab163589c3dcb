"""The language model of Qwen3.5's dense sizes: Qwen3.5-MoE's layers without experts."""

from modeling.families.family import Family
from modeling.families.qwen3_5_moe_text import MROPE, SPLIT_DELTA
from modeling.families.qwen3_next import (
    FULL_INTERVAL,
    GATED_ATTENTION,
    LINEAR_DEFAULTS,
    LINEAR_KEYS,
    LINEAR_LAYERS,
    with_layer_types,
)
from modeling.families.shared import (
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    QK_NORM,
)

FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    since=5,
    unread=r"mtp\..*",
    weights={**DECODER, **GATED_ATTENTION, **QK_NORM, **SPLIT_DELTA, **FEED_FORWARD},
    keys={**DECODER_KEYS, **HEAD_KEYS, **FEED_FORWARD_KEYS, **LINEAR_KEYS, "layer_types": LINEAR_LAYERS},
    constants={**DECODER_CONSTANTS, "attention_bias": False},
    ignored={"full_attention_interval": FULL_INTERVAL, "attn_output_gate": True},
    passed_over=frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
    rope_passed_over=MROPE,
    defaults={
        **DECODER_DEFAULTS,
        **LINEAR_DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "vocab_size": 248320,
    },
    completed=lambda content: with_layer_types(content, 32),
    # models/qwen3_5: as Qwen3.5-MoE's attention and gated delta rule.
    allowed={
        "attention_gate": ("elementwise",),
        "norm_adds_one": (True,),
        "qk_norm": (True,),
        "sliding_window": (None,),
    },
    turns_a_part=True,
    published={},
)
