"""Mixtral (arXiv:2401.04088): every layer has experts, chosen by a softmax whose top_k weights sum to one."""

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    BLOCK_SPARSE_EXPERTS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EXPERTS_ALONE,
    HEAD_KEYS,
    ROUTER_LOSS,
    SOFTMAX_ROUTER,
    WINDOW,
)
from modeling.moe_config import MoEConfig, NoBalance

FAMILY = Family(
    architecture="MixtralForCausalLM",
    weights={**DECODER, **ATTENTION, **BLOCK_SPARSE_EXPERTS},
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        "intermediate_size": EXPERTS_ALONE,
        "num_experts_per_tok": "moe.top_k",
        "num_local_experts": "moe.n_experts",
        "sliding_window": "sliding_window",
    },
    constants={**DECODER_CONSTANTS, "router_jitter_noise": 0.0},
    ignored=ROUTER_LOSS,
    beside={"attention_bias": False},
    defaults={
        **DECODER_DEFAULTS,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "vocab_size": 32000,
    },
    aliases={"num_experts": "num_local_experts"},
    # models/mixtral: every layer has experts; MixtralTopKRouter always renormalises the chosen weights.
    allowed={
        "qk_norm": (False,),
        "moe.n_dense_layers": (0,),
        "moe.normalize_top_k": (True,),
        **SOFTMAX_ROUTER,
    },
    at_least=WINDOW,
    published={
        "Mixtral-8x7B": ModelConfig(
            family="mixtral",
            vocab_size=32000,
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            d_ff=14336,
            rope_theta=1e6,
            norm_eps=1e-5,
            moe=MoEConfig(n_experts=8, top_k=2, d_ff=14336, balance=NoBalance()),
        ),
        "Mixtral-8x22B": ModelConfig(
            family="mixtral",
            vocab_size=32000,
            d_model=6144,
            n_layers=56,
            n_heads=48,
            n_kv_heads=8,
            d_ff=16384,
            rope_theta=1e6,
            norm_eps=1e-5,
            moe=MoEConfig(n_experts=8, top_k=2, d_ff=16384, balance=NoBalance()),
        ),
    },
)
