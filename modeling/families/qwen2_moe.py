"""Qwen1.5-MoE and Qwen2-MoE (arXiv:2407.10671, section 2.2.2): softmax routing, a shared expert behind a gate."""

from collections.abc import Mapping
from typing import Any

from modeling.config import ModelConfig
from modeling.families.family import Family, Key, moe_of
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
    QKV_BIAS,
    ROUTER_LOSS,
    SOFTMAX_ROUTER,
    full_layers,
    layer_types,
)
from modeling.moe_config import MoEConfig, NoBalance

SHARED_EXPERT = {
    "layers.{layer}.feed_forward.shared.gate.weight": "model.layers.{layer}.mlp.shared_expert.gate_proj.weight",
    "layers.{layer}.feed_forward.shared.up.weight": "model.layers.{layer}.mlp.shared_expert.up_proj.weight",
    "layers.{layer}.feed_forward.shared.down.weight": "model.layers.{layer}.mlp.shared_expert.down_proj.weight",
    "layers.{layer}.feed_forward.shared_gate.weight": "model.layers.{layer}.mlp.shared_expert_gate.weight",
}
SHARED_WIDTH = Key(
    ours=("moe.shared_d_ff",),
    write=lambda config: moe_of(config).shared_width,
    read=lambda width: {"moe.shared_d_ff": width},
)
ONE_SHARED_EXPERT: Mapping[str, tuple[Any, ...]] = {"moe.n_shared_experts": (1,), "moe.shared_gate": (True,)}


def all_full(types: Any) -> Mapping[str, Any]:
    """Sets no field: no layer has a window. ValueError where one has."""
    if types is not None and "full_attention_layers" in full_layers(types):
        raise ValueError("every layer must be full_attention, since versions 4 and 5 differ in the others")
    return {}


FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **FEED_FORWARD, **EXPERTS, **SHARED_EXPERT},
    keys={
        **DECODER_KEYS,
        **FEED_FORWARD_KEYS,
        **EXPERT_KEYS,
        **EXPERT_LAYER_KEYS,
        "layer_types": Key(
            ours=(), write=lambda config: layer_types(config.n_layers, range(config.n_layers)), read=all_full
        ),
        "num_experts": "moe.n_experts",
        "qkv_bias": "qkv_bias",
        "shared_expert_intermediate_size": SHARED_WIDTH,
    },
    constants={**DECODER_CONSTANTS, "use_sliding_window": False},
    ignored={**ROUTER_LOSS, "sliding_window": None, "max_window_layers": 28},  # of a window that is not used
    defaults={
        **DECODER_DEFAULTS,
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "layer_types": None,
        "mlp_only_layers": None,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "shared_expert_intermediate_size": 5632,
        "vocab_size": 151936,
    },
    aliases={"num_local_experts": "num_experts"},
    # models/qwen2_moe: d_model / n_heads channels a head; one shared expert of its own width, gated, in each MoE layer.
    allowed={
        **SOFTMAX_ROUTER,
        "sliding_window": (None,),
        "d_head": (None,),
        **ONE_SHARED_EXPERT,
    },
    published={
        "Qwen1.5-MoE-A2.7B": ModelConfig(
            family="qwen2_moe",
            vocab_size=151936,
            d_model=2048,
            n_layers=24,
            n_heads=16,
            n_kv_heads=16,
            d_ff=5632,
            qkv_bias=True,
            rope_theta=1e6,
            moe=MoEConfig(
                n_experts=60,
                top_k=4,
                d_ff=1408,
                n_shared_experts=1,
                shared_d_ff=5632,
                shared_gate=True,
                normalize_top_k=False,
                balance=NoBalance(),
            ),
        ),
    },
)
