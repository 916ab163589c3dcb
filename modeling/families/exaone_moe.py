"""K-EXAONE (LG AI Research, 2026): sigmoid routing, and rotation in layers with a window alone."""

from collections.abc import Mapping
from typing import Any

from modeling.families.exaone4 import types_completed
from modeling.families.family import Family, Key
from modeling.families.glm4_moe_lite import MLP_LAYER_TYPES, N_LEADING, kinds_of_leading
from modeling.families.shared import (
    ALWAYS_MASKED,
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EXPERT_KEYS,
    EXPERTS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    LAYER_TYPES,
    QK_NORM,
    SHARED_EXPERTS,
    WINDOW,
    interval_key,
    unwindowed,
)
from modeling.families.values import checked

DEFAULTS = {
    **DECODER_DEFAULTS,
    "first_k_dense_replace": 1,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "layer_types": None,
    "mlp_layer_types": None,
    "moe_intermediate_size": 1024,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "num_shared_experts": 1,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "topk_group": 1,
    "vocab_size": 102400,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types and mlp_layer_types.

    Where it has no mlp_layer_types, the first ``first_k_dense_replace`` layers are dense.
    """
    values = {**DEFAULTS, **content}
    kinds = kinds_of_leading(values, values["first_k_dense_replace"])
    return {**content, **types_completed(values), "mlp_layer_types": kinds}


FAMILY = Family(
    architecture="ExaoneMoeForCausalLM",
    since=5,
    weights={
        **DECODER,
        **ATTENTION,
        **QK_NORM,
        **FEED_FORWARD,
        **EXPERTS,
        "layers.{layer}.feed_forward.router.bias": "model.layers.{layer}.mlp.e_score_correction_bias",
        **SHARED_EXPERTS,
    },
    unread="mtp.*",  # multi-token prediction
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        **EXPERT_KEYS,
        "first_k_dense_replace": N_LEADING,
        "mlp_layer_types": MLP_LAYER_TYPES,
        "n_group": "moe.n_groups",
        "num_experts": "moe.n_experts",
        "num_shared_experts": "moe.n_shared_experts",
        "routed_scaling_factor": "moe.routed_scale",
        "sliding_window": Key(  # the class refuses null
            ours=("sliding_window",),
            write=ALWAYS_MASKED.write,
            read=lambda width: {"sliding_window": checked(width, int)},
        ),
        "layer_types": LAYER_TYPES,
        "sliding_window_pattern": interval_key(DEFAULTS["sliding_window_pattern"]),
        "topk_group": "moe.top_k_groups",
    },
    constants=DECODER_CONSTANTS,
    ignored={"output_router_logits": False},
    passed_over=frozenset({"is_moe_layer", "num_nextn_predict_layers"}),
    defaults=DEFAULTS,
    completed=completed,
    # models/exaone_moe: its attention rotates queries and keys in layers of sliding_attention.
    derived={"nope_layers": unwindowed},
    # q_norm and k_norm are always there; the router is sigmoid with a selection bias and takes a top 2 within each
    # group of experts; shared_experts are always built.
    allowed={"qk_norm": (True,), "moe.score": ("sigmoid",)},
    at_least={**WINDOW, "moe.n_experts": 2, "moe.n_shared_experts": 1},
    published={},
)
