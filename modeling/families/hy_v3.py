"""Hunyuan 3 (Tencent, 2026): grouped queries with normed heads, sigmoid routing, a list of the layers with experts."""

from collections.abc import Mapping
from typing import Any

from modeling.families.family import Family
from modeling.families.glm4_moe_lite import MLP_LAYER_TYPES, kinds_of_leading
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    EXPERT_KEYS,
    EXPERTS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
)

OURS, THEIRS = "layers.{layer}.feed_forward", "model.layers.{layer}.mlp"
HY_V3 = {
    f"{OURS}.router.weight": f"{THEIRS}.router.gate.weight",
    f"{OURS}.router.bias": f"{THEIRS}.expert_bias",
    **{f"{OURS}.shared.{each}.weight": f"{THEIRS}.shared_mlp.{each}_proj.weight" for each in ("gate", "up", "down")},
}
DEFAULTS = {
    **DECODER_DEFAULTS,
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 4096,
    "initializer_range": 0.006,
    "intermediate_size": 13312,
    "mlp_layer_types": None,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11158840.0,
    "router_scaling_factor": 2.826,
    "vocab_size": 120832,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with mlp_layer_types. Where it has none, only the first layer is dense."""
    return {**content, "mlp_layer_types": kinds_of_leading({**DEFAULTS, **content}, 1)}


FAMILY = Family(
    architecture="HYV3ForCausalLM",
    since=5,
    weights={**DECODER, **ATTENTION, **QK_NORM, **QKV_BIAS, **O_BIAS, **FEED_FORWARD, **EXPERTS, **HY_V3},
    in_fp32=(".mlp.expert_bias",),
    unread=r"model\.layers\.80.*",  # multi-token prediction, after the 80 layers of the published model
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        **{key: field for key, field in EXPERT_KEYS.items() if key != "norm_topk_prob"},
        "attention_bias": ATTENTION_BIAS,
        "mlp_layer_types": MLP_LAYER_TYPES,
        "num_experts": "moe.n_experts",
        "num_shared_experts": "moe.n_shared_experts",
        "router_scaling_factor": "moe.routed_scale",
    },
    constants={**DECODER_CONSTANTS, "mlp_bias": False},  # the shared experts would have biases, too
    # the first says how the sum of routed and shared experts is rounded in 16 bits
    ignored={"enable_moe_fp32_combine": True, "output_router_logits": False},
    defaults=DEFAULTS,
    aliases={"num_local_experts": "num_experts"},
    completed=completed,
    equal=EQUAL_BIASES,
    # models/hy_v3: only causal masks; q_norm and k_norm are always there; HYV3TopKRouter is sigmoid with a selection
    # bias and renormalizes; without shared experts the class would make one as wide as a dense layer.
    allowed={"qk_norm": (True,), "moe.normalize_top_k": (True,), "moe.score": ("sigmoid",)},
    at_least={"moe.n_shared_experts": 1},
    published={},
)
