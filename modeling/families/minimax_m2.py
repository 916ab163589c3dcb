"""MiniMax-M2: every layer has experts, chosen by sigmoids with a bias; norms over all query or key heads."""

from collections.abc import Mapping
from typing import Any

from modeling.families.family import Family, Key
from modeling.families.shared import (
    ATTENTION,
    BLOCK_SPARSE_EXPERTS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EXPERTS_ALONE,
    HEAD_KEYS,
    QK_NORM,
    ROUTER_LOSS,
    number,
    whole_number,
)

DEFAULTS = {
    **DECODER_DEFAULTS,
    "head_dim": 128,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "rope_theta": 5e6,
    "rotary_dim": None,
    "vocab_size": 200064,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with partial_rotary_factor, computed from rotary_dim (rotated channels) where it has only that."""
    turning, channels = content.get("rotary_dim"), content.get("head_dim", DEFAULTS["head_dim"])
    if type(turning) is not int or type(channels) is not int or channels < 1:
        return content
    try:
        return {"partial_rotary_factor": turning / channels, **content}
    except OverflowError:  # `turning_channels` reports it
        return content


def turning_channels(value: Any) -> Mapping[str, Any]:
    """Sets no field, since ``completed`` has read it. ValueError where it is neither null nor a number of channels."""
    return {} if value is None else {**whole_number(value), **number(value)}


FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    since=5,
    weights={
        **DECODER,
        **ATTENTION,
        **QK_NORM,
        **BLOCK_SPARSE_EXPERTS,
        "layers.{layer}.feed_forward.router.bias": ("model.layers.{layer}.block_sparse_moe.e_score_correction_bias"),
    },
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        "intermediate_size": EXPERTS_ALONE,
        "num_experts_per_tok": "moe.top_k",
        "num_local_experts": "moe.n_experts",
        "rotary_dim": Key(ours=(), write=lambda config: config.rope_dim, read=turning_channels),
    },
    constants={
        **DECODER_CONSTANTS,
        "router_jitter_noise": 0.0,
        # The class ignores these keys; other programs that read the files use them.
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    ignored=ROUTER_LOSS,
    passed_over=frozenset(
        {
            *("attn_type_list", "mlp_intermediate_size", "shared_moe_mode"),
            *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
            *("use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        }
    ),
    defaults=DEFAULTS,
    aliases={"num_experts": "num_local_experts"},
    completed=completed,
    # models/minimax_m2: every layer has experts; MiniMaxM2TopKRouter is sigmoid with a selection bias and always
    # renormalises the chosen weights; q_norm and k_norm are always there; only causal masks.
    allowed={
        "qk_norm": (True,),
        "qk_norm_over": ("all_heads",),
        "sliding_window": (None,),
        "moe.n_dense_layers": (0,),
        "moe.n_shared_experts": (0,),
        "moe.normalize_top_k": (True,),
        "moe.routed_scale": (1.0,),
        "moe.score": ("sigmoid",),
    },
    turns_a_part=True,
    published={},
)
