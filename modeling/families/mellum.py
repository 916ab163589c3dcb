"""Mellum 2 (JetBrains, 2026): Qwen3 MoE with windows by layer, under which rotary frequencies are not scaled."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modeling.families.glm4_moe_lite import MLP_LAYER_TYPES, kinds_of_leading
from modeling.families.qwen3_moe import FAMILY as QWEN3
from modeling.families.shared import (
    ATTENTION_BIAS,
    DECODER_CONSTANTS,
    EQUAL_BIASES,
    LAYER_TYPES,
    O_BIAS,
    QKV_BIAS,
    types_by_pattern,
)

DROPPED = (
    "decoder_sparse_step",
    "mlp_only_layers",
    "use_sliding_window",
)  # keys of qwen3_moe that this class lacks
DEFAULTS = {
    **{key: value for key, value in QWEN3.defaults.items() if key not in DROPPED},
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 2304,
    "intermediate_size": 7168,
    "layer_types": None,
    "mlp_layer_types": None,
    "moe_intermediate_size": 896,
    "norm_topk_prob": True,
    "num_experts": 64,
    "num_hidden_layers": 28,
    "rope_local_base_freq": 10000.0,  # not a key of the class: the base under a window where rope_parameters lack it
    "rope_theta": 500000.0,
    "sliding_window": 1024,
    "vocab_size": 98304,
}
ROPE = {  # what the class takes where rope_parameters are left out
    "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types, mlp_layer_types and rope_parameters.

    Where it has no types, all layers have full attention and experts.
    """
    values = {**DEFAULTS, **content}
    types = types_by_pattern(values, range)
    parameters = ROPE if content.get("rope_parameters") is None else content["rope_parameters"]
    kinds = kinds_of_leading(values, 0)
    return {**content, "layer_types": types, "mlp_layer_types": kinds, "rope_parameters": parameters}


FAMILY = replace(
    QWEN3,
    architecture="MellumForCausalLM",
    since=5,
    weights={**QWEN3.weights, **QKV_BIAS, **O_BIAS},
    unread=r"^mtp\.",  # multi-token prediction
    keys={
        **{key: ours for key, ours in QWEN3.keys.items() if key not in DROPPED},
        "attention_bias": ATTENTION_BIAS,
        "mlp_layer_types": MLP_LAYER_TYPES,
        "layer_types": LAYER_TYPES,
    },
    constants=DECODER_CONSTANTS,
    passed_over=frozenset({"mtp_layer_types", "mtp_mlp_layer_types", "num_mtp_layers", "num_nextn_predict_layers"}),
    defaults=DEFAULTS,
    completed=completed,
    equal=EQUAL_BIASES,
    has_local_rope=True,
    needs=("local_rope_theta",),
    # models/mellum: q_norm and k_norm are always there; the class looks for truncate in the wrong table.
    allowed={**QWEN3.allowed, "rope_scaling.truncate": (True,)},
    published={},
)
