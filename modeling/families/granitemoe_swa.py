"""Granite with experts, windows by layer and sinks (granitemoe_swa of transformers): see granite_swa."""

from dataclasses import replace

from modeling.families.granite_swa import SINKS, WINDOW_DEFAULTS, WINDOW_KEYS, types_completed
from modeling.families.granitemoeshared import FAMILY as SHARED
from modeling.families.packed import packed
from modeling.families.shared import WINDOW

OURS, THEIRS = "layers.{layer}.feed_forward", "model.layers.{layer}.block_sparse_moe"
EXPERTS = {  # transformers renames none of these when it saves the class
    f"{OURS}.router.weight": f"{THEIRS}.router.weight",
    **packed(f"{THEIRS}.experts.gate_up_proj", f"{OURS}.experts.gate", f"{OURS}.experts.up"),
    f"{OURS}.experts.down": f"{THEIRS}.experts.down_proj",
}
DEFAULTS = {**SHARED.defaults, **WINDOW_DEFAULTS}

FAMILY = replace(
    SHARED,
    architecture="GraniteMoeSWAForCausalLM",
    since=5,
    weights={**SHARED.weights, **EXPERTS, **SINKS},
    keys={**SHARED.keys, **WINDOW_KEYS},
    constants={key: value for key, value in SHARED.constants.items() if key != "position_embedding_type"},
    defaults=DEFAULTS,
    completed=lambda content: types_completed(content, DEFAULTS),
    # models/granitemoe_swa: as granitemoeshared, with the attention of granite_swa.
    allowed={**SHARED.allowed, "sinks": (True,)},
    at_least=WINDOW,
    published={},
)
