"""SmolLM3 (Hugging Face, 2025): Llama with layers that have no rotary positions (arXiv:2501.18795)."""

from collections.abc import Mapping
from typing import Any

from modeling.config import ModelConfig
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
    LAYER_TYPES,
    O_BIAS,
    QKV_BIAS,
    USED_WINDOW_KEYS,
    WINDOW,
    is_count,
    layer_types,
)

DEFAULTS = {
    **DECODER_DEFAULTS,
    "attention_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": None,
    "mlp_bias": False,
    "no_rope_layer_interval": 4,
    "no_rope_layers": None,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rope_theta": 2e6,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 128256,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with no_rope_layers and layer_types.

    Where it has none, every n-th layer is without rotary positions; and if a window is used, only these layers have it.
    """
    values = {**DEFAULTS, **content}
    n_layers, turns, types = values["num_hidden_layers"], values["no_rope_layers"], values["layer_types"]
    interval, window = values["no_rope_layer_interval"], values["sliding_window"]
    if turns is None:
        turning = is_count(n_layers) and is_count(interval) and interval > 0
        turns = [int((layer + 1) % interval != 0) for layer in range(n_layers)] if turning else []
    if types is None:
        window = window if values["use_sliding_window"] else None
        listed = turns if isinstance(turns, list) else []
        types = layer_types(len(listed), [layer for layer, turned in enumerate(listed) if turned or window is None])
    return {**content, "no_rope_layers": turns, "layer_types": types, "sliding_window": window}


def still_layers(turns: Any) -> Mapping[str, Any]:
    """The field for the layers without rotary positions. ValueError where the list is not one of zeros and ones."""
    if not isinstance(turns, list) or not all(type(each) is int and each in (0, 1) for each in turns):
        raise ValueError("it must be a list of zeros and ones")
    return {"nope_layers": tuple(layer for layer, turned in enumerate(turns) if not turned)}


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **O_BIAS, **FEED_FORWARD, **FEED_FORWARD_BIAS},
    keys={
        **DECODER_KEYS,
        **FEED_FORWARD_KEYS,
        "attention_bias": ATTENTION_BIAS,
        "mlp_bias": "ff_bias",
        "no_rope_layers": Key(
            ours=("nope_layers",),
            write=lambda config: [int(layer not in config.nope_layers) for layer in range(config.n_layers)],
            read=still_layers,
        ),
        "sliding_window": "sliding_window",
        "layer_types": LAYER_TYPES,
        "use_sliding_window": USED_WINDOW_KEYS["use_sliding_window"],
    },
    constants=DECODER_CONSTANTS,
    ignored={"no_rope_layer_interval": 4},  # no_rope_layers decide
    passed_over=frozenset({"max_window_layers", "pretraining_tp"}),
    defaults=DEFAULTS,
    completed=completed,
    equal=EQUAL_BIASES,
    allowed={},
    at_least=WINDOW,
    published={
        "SmolLM3-3B": ModelConfig(
            family="smollm3",
            vocab_size=128256,
            d_model=2048,
            n_layers=36,
            n_heads=16,
            n_kv_heads=4,
            d_ff=11008,
            tie_embeddings=True,
            rope_theta=5e6,
            nope_layers=tuple(range(3, 36, 4)),
        ),
    },
)
