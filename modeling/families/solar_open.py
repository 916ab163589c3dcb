"""Solar Open (Upstage, 2025): GLM-4.5's router, experts and shared experts in every layer, with Llama's attention."""

from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EXPERT_KEYS,
    EXPERTS,
    EXPERTS_ALONE,
    HEAD_KEYS,
    QKV_BIAS,
    SELECTION_BIAS,
    SHARED_EXPERT_KEYS,
    SHARED_EXPERTS,
)

FAMILY = Family(
    architecture="SolarOpenForCausalLM",
    since=5,
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **EXPERTS, **SELECTION_BIAS, **SHARED_EXPERTS},
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **EXPERT_KEYS,
        **{key: ours for key, ours in SHARED_EXPERT_KEYS.items() if key != "first_k_dense_replace"},
        "attention_bias": "qkv_bias",
        "moe_intermediate_size": EXPERTS_ALONE,
        "n_group": "moe.n_groups",
        "topk_group": "moe.top_k_groups",
    },
    # The class ignores first_k_dense_replace and use_qk_norm; other programs that read the files use them.
    constants={**DECODER_CONSTANTS, "first_k_dense_replace": 0, "use_qk_norm": False},
    ignored={"output_router_logits": False},
    passed_over=frozenset({"intermediate_size"}),  # no layer is dense
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 4096,
        "moe_intermediate_size": 1280,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "vocab_size": 196608,
    },
    aliases={"num_local_experts": "n_routed_experts"},
    # models/solar_open: SolarOpenTopkRouter is sigmoid with a selection bias and takes a top 2 within each group of
    # experts; shared_experts are always built; all channels are rotated; only causal masks.
    allowed={"moe.n_dense_layers": (0,), "moe.score": ("sigmoid",)},
    at_least={"moe.n_experts": 2, "moe.n_shared_experts": 1},
    published={},
)
