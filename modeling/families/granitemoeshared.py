"""Granite with experts and a shared one beside them (granitemoeshared of transformers): otherwise as granitemoe."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modeling.families.family import Key, moe_of
from modeling.families.granitemoe import FAMILY as GRANITE
from modeling.families.packed import packed
from modeling.families.shared import SOFTMAX_ROUTER
from modeling.families.values import checked

SHARED_MLP = "model.layers.{layer}.shared_mlp"


def shared_expert(width: Any) -> Mapping[str, Any]:
    """The field for the one shared expert; none where its width is 0."""
    width = checked(width, int)
    return {"moe.n_shared_experts": 0} if width == 0 else {"moe.n_shared_experts": 1, "moe.shared_d_ff": width}


FAMILY = replace(
    GRANITE,
    architecture="GraniteMoeSharedForCausalLM",
    weights={
        **GRANITE.weights,
        **packed(
            f"{SHARED_MLP}.input_linear.weight",
            "layers.{layer}.feed_forward.shared.gate.weight",
            "layers.{layer}.feed_forward.shared.up.weight",
        ),
        "layers.{layer}.feed_forward.shared.down.weight": f"{SHARED_MLP}.output_linear.weight",
    },
    keys={
        **GRANITE.keys,
        "shared_intermediate_size": Key(
            ours=("moe.n_shared_experts", "moe.shared_d_ff"),
            write=lambda config: moe_of(config).shared_width,
            read=shared_expert,
        ),
    },
    defaults={**GRANITE.defaults, "shared_intermediate_size": 0},
    # models/granitemoeshared: as granitemoe, and GraniteMoeSharedMLP in each layer, or in none.
    allowed={**GRANITE.allowed, **SOFTMAX_ROUTER, "moe.n_shared_experts": (0, 1)},
    published={},
)
