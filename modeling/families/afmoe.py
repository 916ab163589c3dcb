"""AFMoE (Arcee Trinity, arXiv:2602.17004): gated attention, rotary only under a window, four norms in a layer."""

from collections.abc import Mapping
from typing import Any

from modeling.families.family import Family, Key
from modeling.families.shared import (
    ALWAYS_MASKED,
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
    LAYER_TYPES,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERTS,
    WINDOW,
    interval_key,
    told_by_interval,
    unwindowed,
)
from modeling.families.values import checked

OURS, THEIRS = "layers.{layer}", "model.layers.{layer}"
AFMOE = {
    f"{OURS}.attention.output_gate.weight": f"{THEIRS}.self_attn.gate_proj.weight",
    f"{OURS}.attention_post_norm.weight": f"{THEIRS}.post_attention_layernorm.weight",
    f"{OURS}.feed_forward_norm.weight": f"{THEIRS}.pre_mlp_layernorm.weight",
    f"{OURS}.feed_forward_post_norm.weight": f"{THEIRS}.post_mlp_layernorm.weight",
    f"{OURS}.feed_forward.router.weight": f"{THEIRS}.mlp.router.gate.weight",
    f"{OURS}.feed_forward.router.bias": f"{THEIRS}.mlp.expert_bias",
}
DEFAULTS = {
    **DECODER_DEFAULTS,
    "attention_bias": False,
    "global_attn_every_n_layers": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "layer_types": None,
    "moe_intermediate_size": 1408,
    "mup_enabled": False,
    "num_attention_heads": 16,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,
    "num_shared_experts": 2,
    "rms_norm_eps": 1e-5,
    "route_scale": 1.0,
    "sliding_window": 1024,
    "vocab_size": 200192,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types. Where it has none, every n-th layer has no window."""
    return {**content, **told_by_interval({**DEFAULTS, **content}, "global_attn_every_n_layers")}


def scaled_or_not(enabled: Any) -> Mapping[str, Any]:
    """The field for mup_enabled: a factor of 1, or a placeholder that ``derived`` replaces by the root of d_model."""
    return {"embedding_scale": 2.0 if checked(enabled, bool) else 1.0}


def root(width: int) -> float:
    """The factor by which the class multiplies embedded tokens where mup_enabled is true."""
    return width**0.5


FAMILY = Family(
    architecture="AfmoeForCausalLM",
    since=5,
    in_fp32=(".mlp.expert_bias",),
    weights={
        **DECODER,
        **ATTENTION,
        **QKV_BIAS,
        **O_BIAS,
        **QK_NORM,
        **FEED_FORWARD,
        **EXPERTS,
        **SHARED_EXPERTS,
        **AFMOE,
    },
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        **{key: field for key, field in EXPERT_KEYS.items() if key != "norm_topk_prob"},
        "attention_bias": ATTENTION_BIAS,
        "mup_enabled": Key(
            ours=("embedding_scale",),
            write=lambda config: config.embedding_scale != 1,
            read=scaled_or_not,
        ),
        "num_dense_layers": "moe.n_dense_layers",
        "num_experts": "moe.n_experts",
        "num_shared_experts": "moe.n_shared_experts",
        "route_scale": "moe.routed_scale",
        "sliding_window": ALWAYS_MASKED,
        "layer_types": LAYER_TYPES,
        "global_attn_every_n_layers": interval_key(DEFAULTS["global_attn_every_n_layers"]),
    },
    constants={
        **DECODER_CONSTANTS,
        # The class ignores these keys; other programs that read the files use them.
        "n_group": 1,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "route_norm": True,
        "score_func": "sigmoid",
        "topk_group": 1,
    },
    ignored={"output_router_logits": False},
    passed_over=frozenset({"load_balance_coeff", "use_grouped_mm"}),
    defaults=DEFAULTS,
    completed=completed,
    equal=EQUAL_BIASES,
    # models/afmoe: AfmoeAttention rotates queries and keys only where layer_types says sliding_attention.
    derived={
        "embedding_scale": lambda config: 1.0 if config.embedding_scale == 1 else root(config.d_model),
        "nope_layers": unwindowed,
    },
    # AfmoeTokenChoiceRouter is sigmoid with a selection bias and renormalizes; the gates and norms are always there.
    allowed={
        "attention_gate": ("elementwise",),
        "moe.normalize_top_k": (True,),
        "moe.score": ("sigmoid",),
        "norm_placement": ("both",),
        "qk_norm": (True,),
    },
    at_least={**WINDOW, "moe.n_shared_experts": 1},
    published={},
)
