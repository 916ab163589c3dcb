"""The language model of Qwen3.5-MoE: Qwen3-Next's layers, its projections in other tensors."""

from modeling.families.family import Family
from modeling.families.packed import packed
from modeling.families.qwen2_moe import ONE_SHARED_EXPERT, SHARED_EXPERT, SHARED_WIDTH
from modeling.families.qwen3_next import (
    GATED_ATTENTION,
    GATED_DELTA,
    LINEAR_ALLOWED,
    LINEAR_DEFAULTS,
    LINEAR_KEYS,
    OURS,
    THEIRS,
    with_layer_types,
)
from modeling.families.shared import (
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EXPERTS,
    EXPERTS_ALONE,
    HEAD_KEYS,
    QK_NORM,
    ROUTER_LOSS,
    SOFTMAX_ROUTER,
)

# Queries, keys and values of all heads follow one another in one tensor; projections for gates have their own.
SPLIT_DELTA = {
    **GATED_DELTA,
    **packed(f"{THEIRS}.linear_attn.in_proj_qkv.weight", *(f"{OURS}.in_{each}.weight" for each in "qkv")),
    **{f"{OURS}.in_{each}.weight": f"{THEIRS}.linear_attn.in_proj_{each}.weight" for each in "zab"},
}
STACK, EXPERTS_OF = f"{THEIRS}.mlp.experts", "layers.{layer}.feed_forward.experts"
STACKED = {
    **packed(f"{STACK}.gate_up_proj", f"{EXPERTS_OF}.gate", f"{EXPERTS_OF}.up"),
    f"{EXPERTS_OF}.down": f"{STACK}.down_proj",
}
MROPE = frozenset({"mrope_section", "mrope_interleaved"})  # of images' positions: those of text are alike in all three
# Other programs read these keys: the class's attention is always gated, and it ignores multi-token prediction.
GATED = {"attn_output_gate": True}
# The published files have these besides: nothing in the classes depends on them.
BESIDE = {"mlp_only_layers": [], "output_gate_type": "swish"}
PASSED_OVER = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
DEFAULTS = {
    **DECODER_DEFAULTS,
    **LINEAR_DEFAULTS,
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 248320,
}

FAMILY = Family(
    architecture="Qwen3_5MoeForCausalLM",
    since=5,
    within="qwen3_5_moe",
    unread=r"mtp\..*|model\.visual\..*",
    weights={**DECODER, **GATED_ATTENTION, **QK_NORM, **SPLIT_DELTA, **EXPERTS, **SHARED_EXPERT},
    stacked=STACKED,  # as the published files have them
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **LINEAR_KEYS,
        "moe_intermediate_size": EXPERTS_ALONE,
        "num_experts": "moe.n_experts",
        "num_experts_per_tok": "moe.top_k",
        "shared_expert_intermediate_size": SHARED_WIDTH,
    },
    constants={**DECODER_CONSTANTS, "attention_bias": False},
    ignored={**ROUTER_LOSS, **GATED},
    beside=BESIDE,
    passed_over=PASSED_OVER,
    rope_passed_over=MROPE,
    defaults=DEFAULTS,
    completed=lambda content: with_layer_types(content, DEFAULTS),
    # models/qwen3_5_moe: Qwen3_5MoeTopKRouter renormalizes; each layer has experts.
    allowed={
        **SOFTMAX_ROUTER,
        **LINEAR_ALLOWED,
        **ONE_SHARED_EXPERT,
        "moe.dense_layers": ((),),
        "moe.every_n_layers": (1,),
        "moe.n_dense_layers": (0,),
        "moe.normalize_top_k": (True,),
    },
    turns_a_part=True,
    published={},
)
