"""Hunyuan 0.5B to 7B (Tencent, 2025): a dense decoder whose heads' queries and keys are normed after they turn."""

from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    O_BIAS,
    QKV_BIAS,
)

LATE_QK_NORM = {
    "layers.{layer}.attention.q_norm.weight": "model.layers.{layer}.self_attn.query_layernorm.weight",
    "layers.{layer}.attention.k_norm.weight": "model.layers.{layer}.self_attn.key_layernorm.weight",
}
# Keys of published files, which are those of a class for more kinds of models than transformers' one computes.
BESIDE = {
    "add_classification_head": False,
    "mlp_bias": False,
    "norm_type": "rms",
    "position_embedding_xdrope": False,
    "use_cla": False,  # keys and values of a layer for the next ones, too
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
    "xdrope_section": None,
}
PASSED_OVER = frozenset(
    {
        *("class_num", "cla_share_factor", "dense_list", "pool_type"),  # of what BESIDE says is not there
        *("eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "pad_id", "text_end_id"),
        *("text_start_id", "org_vocab_size"),
    }
)
DEFAULTS = {
    **DECODER_DEFAULTS,
    "attention_bias": False,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-5,
    "vocab_size": 290943,
}


FAMILY = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    weights={**DECODER, **ATTENTION, **LATE_QK_NORM, **QKV_BIAS, **O_BIAS, **FEED_FORWARD},
    keys={**DECODER_KEYS, **HEAD_KEYS, **FEED_FORWARD_KEYS, "attention_bias": ATTENTION_BIAS},
    constants=DECODER_CONSTANTS,
    ignored={},
    beside=BESIDE,
    passed_over=PASSED_OVER,
    defaults=DEFAULTS,
    aliases={"attention_head_dim": "head_dim"},  # the first files have it alone, with which the class fails
    has_rope_alpha=True,
    equal=EQUAL_BIASES,
    # models/hunyuan_v1_dense: query_layernorm and key_layernorm are always there, behind apply_rotary_pos_emb.
    allowed={"qk_norm": (True,), "qk_norm_after_rope": (True,)},
    published={},
)
