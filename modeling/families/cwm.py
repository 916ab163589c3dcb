"""Code World Model (arXiv:2510.02387): Llama with windows by layer."""

from collections.abc import Mapping
from typing import Any

from modeling.families.family import Family
from modeling.families.shared import (
    ALWAYS_MASKED,
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_BIAS,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    LAYER_TYPES,
    WINDOW,
    types_from_first_full,
)

DEFAULTS = {
    **DECODER_DEFAULTS,
    "head_dim": 128,
    "hidden_size": 6144,
    "intermediate_size": 21504,
    "layer_types": None,
    "mlp_bias": False,
    "num_attention_heads": 48,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": 8192,
    "vocab_size": 128256,
}
ROPE = {  # the class's default where a file has no rope_parameters; it then ignores rope_theta
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types and rotary positions.

    Where it has no types, the first of each four layers has no window; where it has no positions, they are the class's
    own, and frequencies are scaled. An empty rope_scaling is none, an empty rope_parameters are plain positions.
    """
    types = types_from_first_full({**DEFAULTS, **content})
    is_told = content.get("rope_scaling") or content.get("rope_parameters") is not None
    return {**content, "layer_types": types, **({} if is_told else {"rope_parameters": ROPE})}


FAMILY = Family(
    architecture="CwmForCausalLM",
    since=5,
    weights={**DECODER, **ATTENTION, **FEED_FORWARD, **FEED_FORWARD_BIAS},
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        "mlp_bias": "ff_bias",
        "sliding_window": ALWAYS_MASKED,
        "layer_types": LAYER_TYPES,
    },
    constants=DECODER_CONSTANTS,
    ignored={},
    needs_bos=True,
    defaults=DEFAULTS,
    completed=completed,
    # models/cwm: CwmConfig demands hidden_size % num_attention_heads == 0; attention has no biases.
    allowed={},
    heads_divide_d_model=True,
    at_least=WINDOW,
    published={},
)
