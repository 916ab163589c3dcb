"""OLMo 3 (Ai2, 2025): OLMo 2 with windows in three layers of four, whose frequencies are not scaled."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modeling.families.olmo2 import FAMILY as OLMO2
from modeling.families.shared import ALWAYS_MASKED, LAYER_TYPES, WINDOW, types_by_interval

DEFAULTS = {
    **OLMO2.defaults,
    "layer_types": None,
    "rope_local_base_freq": 500000.0,  # not a key of the class: its base under a window where a file gives none
    "rope_theta": 500000.0,
    "sliding_window": 4096,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types. Where it has none, every fourth layer has no window."""
    return {**content, "layer_types": types_by_interval({**DEFAULTS, **content}, 4)}


FAMILY = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    keys={**OLMO2.keys, "sliding_window": ALWAYS_MASKED, "layer_types": LAYER_TYPES},
    defaults=DEFAULTS,
    completed=completed,
    has_local_rope=True,
    needs=("local_rope_theta",),
    rope_scalings=("linear", "llama3", "yarn", "dynamic"),
    # models/olmo3: version 5 looks for a scaling's truncate in the wrong table.
    allowed={**OLMO2.allowed, "rope_scaling.truncate": (True,)},
    at_least=WINDOW,
    published={},
)
