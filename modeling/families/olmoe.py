"""OLMoE (arXiv:2409.02060): every layer has experts, chosen by a softmax, and norms over all query or key heads."""

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    EXPERTS,
    EXPERTS_ALONE,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
    ROUTER_LOSS,
    SOFTMAX_ROUTER,
)
from modeling.moe_config import MoEConfig, NoBalance

FAMILY = Family(
    architecture="OlmoeForCausalLM",
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **O_BIAS, **QK_NORM, **EXPERTS},
    keys={
        **DECODER_KEYS,
        "attention_bias": ATTENTION_BIAS,
        "intermediate_size": EXPERTS_ALONE,
        "norm_topk_prob": "moe.normalize_top_k",
        "num_experts": "moe.n_experts",
        "num_experts_per_tok": "moe.top_k",
    },
    constants={**DECODER_CONSTANTS, "clip_qkv": None},
    ignored=ROUTER_LOSS,
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "vocab_size": 50304,
    },
    aliases={"num_local_experts": "num_experts"},
    equal=EQUAL_BIASES,
    # models/olmoe: every layer has experts; q_norm and k_norm are always there; norm_topk_prob may be either.
    allowed={
        "d_head": (None,),
        "qk_norm": (True,),
        "qk_norm_over": ("all_heads",),
        "moe.n_dense_layers": (0,),
        **SOFTMAX_ROUTER,
    },
    published={
        "OLMoE-1B-7B-0924": ModelConfig(
            family="olmoe",
            vocab_size=50304,
            d_model=2048,
            n_layers=16,
            n_heads=16,
            n_kv_heads=16,
            qk_norm=True,
            qk_norm_over="all_heads",
            norm_eps=1e-5,
            d_ff=1024,
            moe=MoEConfig(n_experts=64, top_k=8, d_ff=1024, normalize_top_k=False, balance=NoBalance()),
        ),
    },
)
