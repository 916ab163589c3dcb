"""Ministral (Mistral AI, 2024): Mistral with windows by layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modeling.families.mistral import FAMILY as MISTRAL
from modeling.families.shared import ALWAYS_MASKED, LAYER_TYPES, types_by_pattern

DEFAULTS = {**MISTRAL.defaults, "layer_types": None}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types. Where it has none, each layer has the window, if there is one."""
    values = {**DEFAULTS, **content}
    has_window = values["sliding_window"] is not None
    types = types_by_pattern(values, lambda n_layers: range(0 if has_window else n_layers))
    return {**content, "layer_types": types}


FAMILY = replace(
    MISTRAL,
    architecture="MinistralForCausalLM",
    keys={**MISTRAL.keys, "sliding_window": ALWAYS_MASKED, "layer_types": LAYER_TYPES},
    defaults=DEFAULTS,
    completed=completed,
    # models/ministral: both masks are made, even where no layer uses one of them.
    allowed={},
    published={},
)
