"""Qwen3-MoE (arXiv:2505.09388): QK norm, softmax routing, layers without experts where wanted."""

from modeling.config import ModelConfig
from modeling.families.family import Family, Key
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EXPERT_KEYS,
    EXPERT_LAYER_KEYS,
    EXPERTS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    QK_NORM,
    ROUTER_LOSS,
    SOFTMAX_ROUTER,
    WINDOW,
)
from modeling.families.values import checked
from modeling.moe_config import MoEConfig, NoBalance

FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    weights={**DECODER, **ATTENTION, **QK_NORM, **FEED_FORWARD, **EXPERTS},
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        **EXPERT_KEYS,
        **EXPERT_LAYER_KEYS,
        "num_experts": "moe.n_experts",
        "sliding_window": "sliding_window",
        "use_sliding_window": Key(  # to be read after sliding_window: if false, the class ignores that one
            ours=("sliding_window",),
            write=lambda config: config.sliding_window is not None,
            read=lambda used: {} if checked(used, bool) else {"sliding_window": None},
        ),
    },
    constants={**DECODER_CONSTANTS, "attention_bias": False},
    ignored=ROUTER_LOSS,
    # Qwen3-Coder's files have them.
    beside={"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
    defaults={
        **DECODER_DEFAULTS,
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    aliases={"num_local_experts": "num_experts"},
    # models/qwen3_moe: q_norm and k_norm are always there; mlp_only_layers names the dense layers; one mask for all
    # layers, sliding where use_sliding_window is set; norm_topk_prob may be either.
    allowed={"qk_norm": (True,), **SOFTMAX_ROUTER},
    at_least=WINDOW,
    published={
        "Qwen3-30B-A3B": ModelConfig(
            family="qwen3_moe",
            vocab_size=151936,
            d_model=2048,
            n_layers=48,
            n_heads=32,
            n_kv_heads=4,
            d_head=128,
            d_ff=6144,
            qk_norm=True,
            rope_theta=1e6,
            moe=MoEConfig(n_experts=128, top_k=8, d_ff=768, balance=NoBalance()),
        ),
        "Qwen3-235B-A22B": ModelConfig(
            family="qwen3_moe",
            vocab_size=151936,
            d_model=4096,
            n_layers=94,
            n_heads=64,
            n_kv_heads=4,
            d_head=128,
            d_ff=12288,
            qk_norm=True,
            rope_theta=1e6,
            moe=MoEConfig(n_experts=128, top_k=8, d_ff=1536, balance=NoBalance()),
        ),
    },
)
