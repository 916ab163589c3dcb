"""EXAONE 4.0 (arXiv:2507.11407): blocks normed after, each head normed, turned where it has a window."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modeling.config import ModelConfig
from modeling.families.family import Family, Key
from modeling.families.olmo2 import POST_NORMS
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    LAYER_TYPES,
    QK_NORM,
    WINDOW,
    interval_key,
    told_by_interval,
    unwindowed,
)

DEFAULTS = {
    **DECODER_DEFAULTS,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "layer_types": None,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "vocab_size": 102400,
}
PATTERN = interval_key(DEFAULTS["sliding_window_pattern"])


def window(config: ModelConfig) -> int | None:
    """Its window as a file has it. Attention turns where there is none at all, so one that no layer has stops all."""
    return 4096 if config.nope_layers and config.sliding_window is None else config.sliding_window


HYBRID_KEYS: dict[str, str | Key] = {
    "sliding_window": Key(
        ours=("sliding_window", "nope_layers"),
        write=window,
        read=lambda width: {"sliding_window": width, "nope_layers": () if width is None else (0,)},  # then `still`
    ),
    "layer_types": LAYER_TYPES,
    # which the class itself makes 0 without a window
    "sliding_window_pattern": replace(PATTERN, write=lambda config: 0 if window(config) is None else 4),
}


def still(config: ModelConfig) -> tuple[int, ...]:
    """The layers in which nothing turns."""
    return unwindowed(config) if config.sliding_window is not None or config.nope_layers else ()


def types_completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """``layer_types``, every so many a layer without a window where they are not told; and the pattern."""
    if values["sliding_window"] is None:  # the class then looks at no pattern
        values = {**values, "sliding_window_pattern": 1}
    return told_by_interval(values, "sliding_window_pattern")


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """With layer_types."""
    return {**content, **types_completed({**DEFAULTS, **content})}


FAMILY = Family(
    architecture="Exaone4ForCausalLM",
    weights={**DECODER, **POST_NORMS, **ATTENTION, **QK_NORM, **FEED_FORWARD},
    keys={**DECODER_KEYS, **HEAD_KEYS, **FEED_FORWARD_KEYS, **HYBRID_KEYS},
    constants=DECODER_CONSTANTS,
    ignored={},
    defaults=DEFAULTS,
    completed=completed,
    derived={"nope_layers": still},
    # models/exaone4: Exaone4DecoderLayer norms what attention and mlp put out; q_norm and k_norm are always there.
    allowed={"norm_placement": ("post",), "qk_norm": (True,)},
    at_least=WINDOW,
    published={},
)
