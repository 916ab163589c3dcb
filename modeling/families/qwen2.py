"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115): a dense decoder with biases of queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    LAYER_TYPES,
    QKV_BIAS,
    USED_WINDOW_KEYS,
    WINDOW,
    types_from_first_window,
)

DEFAULTS = {
    **DECODER_DEFAULTS,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "layer_types": None,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types. Where it has none, layers from max_window_layers on have the window."""
    values = {**DEFAULTS, **content}
    window = values["sliding_window"] if values["use_sliding_window"] else None
    return {**content, "sliding_window": window, "layer_types": types_from_first_window(values, window)}


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **FEED_FORWARD},
    keys={
        **DECODER_KEYS,
        **FEED_FORWARD_KEYS,
        "sliding_window": "sliding_window",
        "layer_types": LAYER_TYPES,
        **USED_WINDOW_KEYS,
    },
    constants=DECODER_CONSTANTS,
    ignored={},
    beside={"use_mrope": False},  # the files of Qwen2.5's smaller sizes have it
    defaults=DEFAULTS,
    completed=completed,
    # models/qwen2: d_model / n_heads channels a head; q, k and v always have biases, o never.
    allowed={"d_head": (None,), "qkv_bias": (True,)},
    at_least=WINDOW,
    published={
        "Qwen2.5-0.5B": ModelConfig(
            family="qwen2",
            vocab_size=151936,
            d_model=896,
            n_layers=24,
            n_heads=14,
            n_kv_heads=2,
            d_ff=4864,
            tie_embeddings=True,
            qkv_bias=True,
            rope_theta=1e6,
        ),
        "Qwen2.5-7B": ModelConfig(
            family="qwen2",
            vocab_size=152064,
            d_model=3584,
            n_layers=28,
            n_heads=28,
            n_kv_heads=4,
            d_ff=18944,
            qkv_bias=True,
            rope_theta=1e6,
        ),
    },
)
