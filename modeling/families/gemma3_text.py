"""Gemma 3 (arXiv:2503.19786), its text model: blocks normed before and after, windows in five layers of six."""

from collections.abc import Mapping
from typing import Any

from modeling.config import ModelConfig
from modeling.families.family import Family, Key
from modeling.families.shared import (
    ALWAYS_MASKED,
    ATTENTION,
    DECODER,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    LAYER_TYPES,
    QK_NORM,
    WINDOW,
    interval_key,
    told_by_interval,
)

NORMS = {
    "layers.{layer}.attention_post_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.{layer}.feed_forward_norm.weight": "model.layers.{layer}.pre_feedforward_layernorm.weight",
    "layers.{layer}.feed_forward_post_norm.weight": "model.layers.{layer}.post_feedforward_layernorm.weight",
}
# Of images, and how the projector from them begins: keys of the published sizes from 4B on.
AROUND = frozenset(
    {"boi_token_index", "eoi_token_index", "image_token_index", "initializer_range", "mm_tokens_per_image"}
)
DEFAULTS = {
    **DECODER_DEFAULTS,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "layer_types": None,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1e6,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types. Where it has none, every sliding_window_pattern-th layer has no window."""
    return {**content, **told_by_interval({**DEFAULTS, **content}, "sliding_window_pattern")}


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    within="gemma3",
    prefixes_of_text={
        "model.language_model.": "model.",
        "language_model.model.": "model.",  # of older files, and of those that transformers saves
        "language_model.lm_head.": "lm_head.",
    },
    text_constants={"final_logit_softcapping": None},  # models/gemma3: the class with images has no cap of logits
    around=AROUND,
    unread=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    weights={**DECODER, **NORMS, **ATTENTION, **QK_NORM, **FEED_FORWARD},
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        "sliding_window": ALWAYS_MASKED,
        "final_logit_softcapping": "logit_cap",
        "layer_types": LAYER_TYPES,
        "sliding_window_pattern": interval_key(DEFAULTS["sliding_window_pattern"]),
        "query_pre_attn_scalar": Key(
            ours=("score_channels",),
            write=lambda config: int(config.score_channels or config.head_dim),
            read=lambda channels: {"score_channels": channels},
        ),
    },
    constants={
        "attention_bias": False,
        "attn_logit_softcapping": None,  # the class computes without it, whatever it says
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
    },
    ignored={},
    defaults=DEFAULTS,
    completed=completed,
    heads_divide_d_model=True,
    has_local_rope=True,
    local_rope_key="rope_local_base_freq",
    rope_scalings=("linear",),  # of the others' keys version 5 looks for some in the wrong table
    needs=("local_rope_theta",),
    whole=("score_channels",),
    derived={"embedding_scale": lambda config: config.d_model**0.5},
    # models/gemma3: Gemma3RMSNorm adds one to its weights; q_norm and k_norm are always there.
    allowed={
        "activation": ("gelu_tanh",),
        "norm_adds_one": (True,),
        "norm_placement": ("both",),
        "qk_norm": (True,),
    },
    at_least=WINDOW,
    published={
        "gemma-3-1b": ModelConfig(
            family="gemma3_text",
            vocab_size=262144,
            d_model=1152,
            n_layers=26,
            n_heads=4,
            n_kv_heads=1,
            d_head=256,
            d_ff=6912,
            tie_embeddings=True,
            norm_placement="both",
            norm_adds_one=True,
            qk_norm=True,
            activation="gelu_tanh",
            embedding_scale=1152**0.5,
            score_channels=256.0,
            sliding_window=512,
            full_attention_layers=(5, 11, 17, 23),
            rope_theta=1e6,
            local_rope_theta=10000.0,
        ),
    },
)
