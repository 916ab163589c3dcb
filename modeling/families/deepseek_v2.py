"""DeepSeek-V2 (arXiv:2405.04434): latent attention, softmax routing within groups of experts, shared experts."""

from collections.abc import Mapping
from typing import Any

from modeling.config import MLAConfig, ModelConfig
from modeling.families.deepseek_v3 import FAMILY as V3
from modeling.families.deepseek_v3 import LATENT_ATTENTION
from modeling.families.family import Family, Key, moe_of
from modeling.families.shared import (
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    EXPERTS,
    FEED_FORWARD,
    MTP_KEYS,
    SHARED_EXPERTS,
    SOFTMAX_ROUTER,
)
from modeling.moe_config import MoEConfig, NoBalance
from modeling.rope_scaling import YarnScaling

METHODS = ("greedy", "group_limited_greedy")


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with n_group and topk_group set to 1 where its method of choice does not use them."""
    if content.get("topk_method", "greedy") != "greedy":
        return content
    return {**content, "n_group": 1, "topk_group": 1}


def known_method(method: Any) -> Mapping[str, Any]:
    """Sets no field, since the numbers of groups decide. ValueError for a method that is not known."""
    if method not in METHODS:
        raise ValueError(f"it must be {' or '.join(METHODS)}")
    return {}


FAMILY = Family(
    architecture="DeepseekV2ForCausalLM",
    weights={**DECODER, **LATENT_ATTENTION, **FEED_FORWARD, **EXPERTS, **SHARED_EXPERTS},
    keys={
        **{key: ours for key, ours in V3.keys.items() if key not in ("norm_topk_prob", *MTP_KEYS)},
        "topk_method": Key(ours=(), write=lambda config: METHODS[moe_of(config).n_groups > 1], read=known_method),
    },
    constants={
        **DECODER_CONSTANTS,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_topk_prob": False,
        # The class ignores these keys; other programs that read the files use them.
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
    },
    ignored={"aux_loss_alpha": 0.0, "ep_size": 1, "output_router_logits": False, "seq_aux": True},
    defaults={
        **DECODER_DEFAULTS,
        "first_k_dense_replace": 0,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1407,
        "n_group": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 32,
        "num_experts_per_tok": None,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    aliases={"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"},
    completed=completed,
    heads_divide_d_model=True,
    # models/deepseek_v2: softmax without renormalisation; a group counts by its best expert; shared_experts are always
    # built; only causal masks.
    allowed={
        "sliding_window": (None,),
        **{key: values for key, values in SOFTMAX_ROUTER.items() if key in ("moe.score", "moe.balance.name")},
        "moe.group_score": ("best",),
        "moe.normalize_top_k": (False,),
    },
    at_least={"moe.n_shared_experts": 1},
    even=("mla.d_nope", "mla.kv_lora_rank"),  # the class looks at pairs of channels as complex numbers
    published={
        "DeepSeek-V2-Lite": ModelConfig(
            family="deepseek_v2",
            vocab_size=102400,
            d_model=2048,
            n_layers=27,
            n_heads=16,
            n_kv_heads=16,
            d_ff=10944,
            rope_scaling=YarnScaling(factor=40.0, original_seq_len=4096, mscale=0.707, mscale_all_dim=0.707),
            mla=MLAConfig(kv_lora_rank=512, q_lora_rank=None, d_nope=128, d_rope=64, d_v=128),
            moe=MoEConfig(
                n_experts=64,
                top_k=6,
                d_ff=1408,
                n_shared_experts=2,
                n_dense_layers=1,
                group_score="best",
                normalize_top_k=False,
                balance=NoBalance(),
            ),
        ),
        "DeepSeek-V2": ModelConfig(
            family="deepseek_v2",
            vocab_size=102400,
            d_model=5120,
            n_layers=60,
            n_heads=128,
            n_kv_heads=128,
            d_ff=12288,
            rope_scaling=YarnScaling(factor=40.0, original_seq_len=4096, mscale=0.707, mscale_all_dim=0.707),
            mla=MLAConfig(kv_lora_rank=512, q_lora_rank=1536, d_nope=128, d_rope=64, d_v=128),
            moe=MoEConfig(
                n_experts=160,
                top_k=6,
                d_ff=1536,
                n_shared_experts=2,
                n_dense_layers=1,
                n_groups=8,
                top_k_groups=3,
                group_score="best",
                normalize_top_k=False,
                routed_scale=16.0,
                balance=NoBalance(),
            ),
        ),
    },
)
