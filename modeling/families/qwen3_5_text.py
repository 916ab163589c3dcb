"""The language model of Qwen3.5's dense sizes: Qwen3.5-MoE's layers without experts."""

from modeling.families.family import Family
from modeling.families.qwen3_5_moe_text import BESIDE, GATED, MROPE, PASSED_OVER, SPLIT_DELTA
from modeling.families.qwen3_next import (
    GATED_ATTENTION,
    LINEAR_ALLOWED,
    LINEAR_DEFAULTS,
    LINEAR_KEYS,
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

DEFAULTS = {
    **DECODER_DEFAULTS,
    **LINEAR_DEFAULTS,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
}

FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    since=5,
    within="qwen3_5",
    unread=r"mtp\..*|model\.visual\..*",
    weights={**DECODER, **GATED_ATTENTION, **QK_NORM, **SPLIT_DELTA, **FEED_FORWARD},
    keys={**DECODER_KEYS, **HEAD_KEYS, **FEED_FORWARD_KEYS, **LINEAR_KEYS},
    constants={**DECODER_CONSTANTS, "attention_bias": False},
    ignored=GATED,
    beside=BESIDE,
    passed_over=PASSED_OVER,
    rope_passed_over=MROPE,
    defaults=DEFAULTS,
    completed=lambda content: with_layer_types(content, DEFAULTS),
    # models/qwen3_5: as Qwen3.5-MoE's attention and gated delta rule.
    allowed=LINEAR_ALLOWED,
    turns_a_part=True,
    published={},
)
