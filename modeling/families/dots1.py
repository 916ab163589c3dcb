"""dots.llm1 (arXiv:2506.05767): Qwen3's attention, sigmoid routing within groups of experts, shared experts."""

from collections.abc import Mapping
from typing import Any

from modeling.families.family import Family, Key
from modeling.families.shared import (
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
    LAYER_TYPES,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
    SELECTION_BIAS,
    SHARED_EXPERT_KEYS,
    SHARED_EXPERTS,
    USED_WINDOW_KEYS,
    WINDOW,
    types_from_first_window,
)

SIGMOID = ("noaux_tc", "sigmoid")  # names of the router's scores, of which llama.cpp knows only the first
DEFAULTS = {
    **DECODER_DEFAULTS,
    "attention_bias": False,
    "first_k_dense_replace": 0,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "layer_types": None,
    "max_window_layers": 62,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": None,
    "n_shared_experts": None,
    "norm_topk_prob": False,
    "num_attention_heads": 32,
    "num_experts_per_tok": None,
    "num_hidden_layers": 62,
    "num_key_value_heads": 32,
    "routed_scaling_factor": 1.0,
    "scoring_func": SIGMOID[0],
    "sliding_window": 4096,
    "topk_group": 1,
    "vocab_size": 152064,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types. Where it has none, layers from max_window_layers on have the window."""
    values = {**DEFAULTS, **content}
    return {**content, "layer_types": types_from_first_window(values, values["sliding_window"])}


def known_score(name: Any) -> Mapping[str, Any]:
    """Sets no field. ValueError for another score, which the class ignores but other programs do not."""
    if name not in SIGMOID:
        raise ValueError(f"it must be {' or '.join(SIGMOID)}")
    return {}


FAMILY = Family(
    architecture="Dots1ForCausalLM",
    weights={
        **DECODER,
        **ATTENTION,
        **QK_NORM,
        **QKV_BIAS,
        **O_BIAS,
        **FEED_FORWARD,
        **EXPERTS,
        **SELECTION_BIAS,
        **SHARED_EXPERTS,
    },
    keys={
        **DECODER_KEYS,
        **FEED_FORWARD_KEYS,
        **EXPERT_KEYS,
        **SHARED_EXPERT_KEYS,
        "attention_bias": ATTENTION_BIAS,
        "n_group": "moe.n_groups",
        "topk_group": "moe.top_k_groups",
        "sliding_window": "sliding_window",
        "layer_types": LAYER_TYPES,
        "max_window_layers": USED_WINDOW_KEYS["max_window_layers"],
        "scoring_func": Key(ours=(), write=lambda config: SIGMOID[0], read=known_score),
    },
    constants={
        **DECODER_CONSTANTS,
        # The class ignores these keys; other programs that read the files use them.
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
    },
    ignored={"output_router_logits": False},
    passed_over=frozenset({"use_sliding_window"}),  # the class looks at layer_types
    defaults=DEFAULTS,
    aliases={"num_local_experts": "n_routed_experts"},
    completed=completed,
    equal=EQUAL_BIASES,
    # models/dots1: d_model / n_heads channels a head; q_norm and k_norm are always there; the router is sigmoid with a
    # selection bias and takes a top 2 within each group of experts; shared_experts are always built;
    # first_k_dense_replace counts the dense layers.
    allowed={"d_head": (None,), "qk_norm": (True,), "moe.score": ("sigmoid",)},
    at_least={**WINDOW, "moe.n_experts": 2, "moe.n_shared_experts": 1},
    published={},
)
