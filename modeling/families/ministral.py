"""Ministral (Mistral AI, 2024): Mistral with windows by layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modeling.families.mistral import FAMILY as MISTRAL
from modeling.families.shared import ALWAYS_MASKED, LAYER_TYPES, told_by_pattern

DEFAULTS = {**MISTRAL.defaults, "layer_types": None}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """With layer_types. Where they are not told, each layer has the window, if there is one."""
    values = {**DEFAULTS, **content}
    types, window = values["layer_types"], values["sliding_window"]
    if types is None:
        types = told_by_pattern(values["num_hidden_layers"], lambda n_layers: range(n_layers if window is None else 0))
    return {**content, "layer_types": types}


FAMILY = replace(
    MISTRAL,
    architecture="MinistralForCausalLM",
    keys={**MISTRAL.keys, "sliding_window": ALWAYS_MASKED, "layer_types": LAYER_TYPES},
    defaults=DEFAULTS,
    completed=completed,
    # models/ministral: both masks are made, whatever layers there are.
    allowed={},
    published={},
)
