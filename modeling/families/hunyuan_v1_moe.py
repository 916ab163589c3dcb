"""Hunyuan A13B (Tencent, 2025): heads normed after they turn, softmax routing, one shared expert in each layer."""

from collections.abc import Mapping
from typing import Any

from modeling.families.family import Family, Key, moe_of
from modeling.families.hunyuan_v1_dense import BESIDE, DEFAULTS, LATE_QK_NORM, PASSED_OVER
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    EXPERTS,
    EXPERTS_ALONE,
    HEAD_KEYS,
    O_BIAS,
    QKV_BIAS,
    SOFTMAX_ROUTER,
    is_count,
)

OURS, THEIRS = "layers.{layer}.feed_forward", "model.layers.{layer}.mlp"
ROUTER_AND_SHARED = {
    f"{OURS}.router.weight": f"{THEIRS}.gate.wg.weight",
    **{f"{OURS}.shared.{each}.weight": f"{THEIRS}.shared_mlp.{each}_proj.weight" for each in ("gate", "up", "down")},
}
BY_LAYER = ("moe_intermediate_size", "moe_topk", "num_shared_expert")  # keys that may be lists with an entry a layer


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with one number in place of a list that has the same one for each layer."""
    n_layers = content.get("num_hidden_layers", DEFAULTS["num_hidden_layers"])
    return {**content, **{key: one_of(content[key], n_layers) for key in BY_LAYER if key in content}}


def one_of(value: Any, n_layers: Any) -> Any:
    """The number that a list has for each of the layers, or the value itself where it is no such list."""
    if not isinstance(value, list) or not is_count(n_layers) or not 0 < n_layers <= len(value):
        return value
    return value[0] if all(type(each) is int and each == value[0] for each in value[:n_layers]) else value


def chosen(top_k: Any) -> Mapping[str, Any]:
    """The field for the number of experts of a token. ValueError where layers differ in it."""
    if isinstance(top_k, list):
        raise ValueError("it must be int, or a list of the same one for each layer")
    return {"moe.top_k": top_k}


FAMILY = Family(
    architecture="HunYuanMoEV1ForCausalLM",
    weights={**DECODER, **ATTENTION, **LATE_QK_NORM, **QKV_BIAS, **O_BIAS, **EXPERTS, **ROUTER_AND_SHARED},
    in_fp32=(".mlp.gate.wg.weight",),  # the class makes routers in fp32, whatever its dtype is
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        "attention_bias": ATTENTION_BIAS,
        "intermediate_size": EXPERTS_ALONE,
        "moe_topk": Key(ours=("moe.top_k",), write=lambda config: moe_of(config).top_k, read=chosen),
        "num_experts": "moe.n_experts",
    },
    constants=DECODER_CONSTANTS,
    ignored={"output_router_logits": False},
    beside={
        **BESIDE,
        "group_limited_greedy": False,
        "moe_drop_tokens": False,
        "moe_layer_num_skipped": 0,
        "moe_random_routing_dropped_token": False,
        "norm_topk_prob": True,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,  # there are shared experts
        "use_mla": False,
    },
    same={"moe_intermediate_size": "intermediate_size"},  # at which the class looks alone
    passed_over=PASSED_OVER | {"moe_intermediate_size", "sep_token_id"},
    defaults={**DEFAULTS, "moe_topk": 1, "num_experts": 1},
    aliases={
        "attention_head_dim": "head_dim",  # the first files have it alone, with which the class fails
        "num_experts_per_tok": "moe_topk",
        "num_local_experts": "num_experts",
    },
    completed=completed,
    has_rope_alpha=True,
    equal=EQUAL_BIASES,
    # models/hunyuan_v1_moe: query_layernorm and key_layernorm are always there, behind apply_rotary_pos_emb;
    # HunYuanMoEV1Gate renormalizes the softmax of the chosen; shared_mlp is in each layer, as wide as an expert.
    allowed={
        "qk_norm": (True,),
        "qk_norm_after_rope": (True,),
        **SOFTMAX_ROUTER,
        "moe.n_dense_layers": (0,),
        "moe.n_shared_experts": (1,),
        "moe.normalize_top_k": (True,),
    },
    published={},
)
