"""ERNIE 4.5 with experts (Baidu, 2025): softmax routing, a selection bias, shared experts, dense layers around."""

from collections.abc import Mapping
from typing import Any

from modeling.config import ModelConfig
from modeling.expert_layers import told_once
from modeling.families.family import Family, Key, moe_of
from modeling.families.packed import Packed
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EXPERTS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    PAIRED,
    ROUTER_LOSS,
    SHARED_EXPERTS,
    SOFTMAX_ROUTER,
    is_count,
)

BIAS = "layers.{layer}.feed_forward.router.bias"
DEFAULTS = {
    **DECODER_DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 103424,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with moe_layer_end_index replaced by the layers after it, and the start clipped to the layers."""
    values = {**DEFAULTS, **content}
    start, end = values["moe_layer_start_index"], values["moe_layer_end_index"]
    n_layers = values["num_hidden_layers"]
    if not is_count(n_layers):
        return {**content, "moe_layer_end_index": ()}
    if type(start) is int:
        start = min(max(start, 0), n_layers)
    if type(end) is int:
        end = () if end == -1 else tuple(range(max(end + 1, 0), n_layers))
    return {**content, "moe_layer_start_index": start, "moe_layer_end_index": end}


def layers_behind(layers: Any) -> Mapping[str, Any]:
    """The field for the layers without experts at the end.

    ValueError where ``completed`` has not made a tuple of the key.
    """
    if not isinstance(layers, tuple):
        raise ValueError("it must be int")
    return {"moe.dense_layers": layers}


def last_with_experts(config: ModelConfig) -> int:
    """The number of the layer after which the class has no experts."""
    return min(told_once(moe_of(config), config.n_layers).dense_layers, default=config.n_layers) - 1


FAMILY = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    weights={
        **DECODER,
        **ATTENTION,
        **PAIRED,
        **FEED_FORWARD,
        **EXPERTS,
        BIAS: Packed(name="model.layers.{layer}.mlp.moe_statics.e_score_correction_bias", parts=(BIAS,), as_row=True),
        **SHARED_EXPERTS,
    },
    in_fp32=("e_score_correction_bias", ".mlp.gate.weight"),
    unread="mtp",  # the modules of multi-token prediction
    keys={
        **{key: ours for key, ours in DECODER_KEYS.items() if key != "attention_dropout"},  # the class drops nothing
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        "moe_intermediate_size": "moe.d_ff",
        "moe_k": "moe.top_k",
        "moe_layer_end_index": Key(ours=("moe.dense_layers",), write=last_with_experts, read=layers_behind),
        "moe_layer_interval": "moe.every_n_layers",
        "moe_layer_start_index": Key(
            ours=("moe.n_dense_layers",),
            write=lambda config: told_once(moe_of(config), config.n_layers).n_dense_layers,
            read=lambda start: {"moe.n_dense_layers": start},
        ),
        "moe_num_experts": "moe.n_experts",
        "moe_num_shared_experts": "moe.n_shared_experts",
    },
    # The class divides the chosen scores by their sum, or by moe_norm_min if that is larger. That can only be where a
    # selection bias has chosen experts whose scores together are below a trillionth.
    constants={**DECODER_CONSTANTS, "moe_norm_min": 1e-12, "use_bias": False},
    ignored=ROUTER_LOSS,
    beside={"moe_gate": "topk", "use_rmsnorm": True},
    passed_over=frozenset({"attention_dropout", "moe_capacity", "moe_use_aux_free", "num_nextn_predict_layers"}),
    defaults=DEFAULTS,
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    completed=completed,
    dense_layers_are_last=True,
    # models/ernie4_5_moe: Ernie4_5_MoeTopKRouter renormalizes the softmax of the chosen; channels (2c, 2c + 1) are
    # rotated in pairs; only causal masks; use_bias is for shared experts and the head too.
    allowed={
        "moe.normalize_top_k": (True,),
        **{key: SOFTMAX_ROUTER[key] for key in ("moe.score", "moe.routed_scale")},
    },
    published={},
)
