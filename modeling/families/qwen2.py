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
from modeling.families.values import checked, shown

CHUNKS = "dual_chunk_attention_config"  # a key of Qwen2.5-1M's files
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


def longest_in_chunks(content: Mapping[str, Any]) -> int | None:
    """The longest sequence in which dual chunk attention (arXiv:2402.17463) computes what plain attention computes.

    It is a chunk without the tokens that two chunks share; None where config.json has none. Positions of longer
    sequences are told otherwise there, which transformers' class ignores. ValueError where the table has other keys.
    """
    table = content.get(CHUNKS)
    if table is None:
        return None
    keys = {"chunk_size", "local_size", "original_max_position_embeddings"}
    rule = f"{CHUNKS}={shown(table)} is not possible: it must have {', '.join(sorted(keys))} alone"
    if not isinstance(table, dict) or table.keys() != keys:
        raise ValueError(rule)
    try:
        sizes = {key: checked(table[key], int) for key in keys}
    except ValueError as error:
        raise ValueError(f"{rule}, and {error}") from None
    longest = min(sizes["chunk_size"] - sizes["local_size"], sizes["original_max_position_embeddings"])
    if sizes["local_size"] < 0 or longest < 1:
        raise ValueError(f"{rule}, with local_size below chunk_size")
    return longest


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
    # Qwen2.5-1M's: within its chunks this is plain attention, and an import's sequences are no longer than that
    passed_over=frozenset({CHUNKS}),
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
