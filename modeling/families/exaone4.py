"""EXAONE 4.0 (arXiv:2507.11407): norms of blocks' outputs, QK norm, and rotation in layers with a window alone."""

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
    """The value of sliding_window in a file.

    The class rotates in all layers if there is no window, and otherwise in the layers that have it. So a model without
    a window and without rotation is written with a window that no layer has.
    """
    return 4096 if config.nope_layers and config.sliding_window is None else config.sliding_window


HYBRID_KEYS: dict[str, str | Key] = {
    "sliding_window": Key(
        ours=("sliding_window", "nope_layers"),
        write=window,
        read=lambda width: {"sliding_window": width, "nope_layers": () if width is None else (0,)},  # then `still`
    ),
    "layer_types": LAYER_TYPES,
    # the class itself sets it to 0 without a window
    "sliding_window_pattern": replace(PATTERN, write=lambda config: 0 if window(config) is None else 4),
}


def still(config: ModelConfig) -> tuple[int, ...]:
    """The layers without rotation: those without a window, if there is a window; otherwise all or none."""
    return unwindowed(config) if config.sliding_window is not None or config.nope_layers else ()


def types_completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """``layer_types`` and ``sliding_window_pattern``.

    Where a file leaves the types out, every layer whose number is a multiple of the pattern has no window.
    """
    if values["sliding_window"] is None:  # the class then ignores the pattern
        values = {**values, "sliding_window_pattern": 1}
    return told_by_interval(values, "sliding_window_pattern")


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types and sliding_window_pattern."""
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
    # models/exaone4: Exaone4DecoderLayer norms the outputs of attention and mlp; q_norm and k_norm are always there.
    allowed={"norm_placement": ("post",), "qk_norm": (True,)},
    at_least=WINDOW,
    published={},
)
