"""Qwen3-Next: three layers of gated delta rule for each of gated attention, and experts with a gated shared one."""

from collections.abc import Mapping
from typing import Any

from modeling.config import ModelConfig
from modeling.families.family import Family, Key
from modeling.families.packed import head_groups, packed
from modeling.families.qwen2_moe import ONE_SHARED_EXPERT, SHARED_EXPERT, SHARED_WIDTH
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
    HEAD_KEYS,
    LINEAR,
    QK_NORM,
    ROUTER_LOSS,
    SOFTMAX_ROUTER,
    interval_key,
    kinds_of_layers,
    layer_types,
    told_by_interval,
)

OURS, THEIRS = "layers.{layer}.attention", "model.layers.{layer}"
# In q_proj each head's query rows are followed by its gate rows.
GATED_ATTENTION = {
    **{ours: ATTENTION[ours] for ours in (f"{OURS}.{each}.weight" for each in "kvo")},
    **packed(f"{THEIRS}.self_attn.q_proj.weight", f"{OURS}.q.weight", f"{OURS}.output_gate.weight", groups=head_groups),
}
# Names that all classes with the gated delta rule share.
GATED_DELTA = {
    **packed(
        f"{THEIRS}.linear_attn.conv1d.weight",
        *(f"{OURS}.{each}_taps.weight" for each in "qkv"),
        as_column=True,
    ),
    f"{OURS}.log_rates.weight": f"{THEIRS}.linear_attn.A_log",
    f"{OURS}.step_biases.weight": f"{THEIRS}.linear_attn.dt_bias",
    f"{OURS}.norm.weight": f"{THEIRS}.linear_attn.norm.weight",
    f"{OURS}.out.weight": f"{THEIRS}.linear_attn.out_proj.weight",
}


def linear_key_groups(config: ModelConfig) -> int:
    """One group for each key head of linear attention: its rows, and those of the value heads that share it."""
    assert config.linear_attention is not None
    return config.linear_attention.n_k_heads


INTERVAL = "full_attention_interval"
LINEAR_DEFAULTS = {
    INTERVAL: 4,
    "head_dim": 256,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
}
LINEAR_KEYS: dict[str, str | Key] = {
    INTERVAL: interval_key(4),
    "layer_types": Key(
        ours=("full_attention_layers",),
        write=lambda config: layer_types(config.n_layers, config.full_attention_layers, LINEAR),
        read=lambda types: {"full_attention_layers": kinds_of_layers(types, LINEAR)},
    ),
    "linear_conv_kernel_dim": "linear_attention.conv_size",
    "linear_key_head_dim": "linear_attention.d_k",
    "linear_num_key_heads": "linear_attention.n_k_heads",
    "linear_num_value_heads": "linear_attention.n_v_heads",
    "linear_value_head_dim": "linear_attention.d_v",
}
# The classes' attention is gated, with QK norm; norms add one, except that of the gated delta rule.
LINEAR_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "attention_gate": ("elementwise",),
    "norm_adds_one": (True,),
    "qk_norm": (True,),
    "sliding_window": (None,),
}
DEFAULTS = {
    **DECODER_DEFAULTS,
    **LINEAR_DEFAULTS,
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "mlp_only_layers": None,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}


def with_layer_types(content: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types. Where it has none, all but every n-th layer are linear."""
    return {**content, **told_by_interval({**defaults, **content}, INTERVAL, LINEAR)}


FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    unread=r"mtp\..*",
    weights={
        **DECODER,
        **GATED_ATTENTION,
        **QK_NORM,
        **GATED_DELTA,
        **packed(
            f"{THEIRS}.linear_attn.in_proj_qkvz.weight",
            *(f"{OURS}.in_{each}.weight" for each in "qkvz"),
            groups=linear_key_groups,
        ),
        **packed(
            f"{THEIRS}.linear_attn.in_proj_ba.weight",
            *(f"{OURS}.in_{each}.weight" for each in "ba"),
            groups=linear_key_groups,
        ),
        **FEED_FORWARD,
        **EXPERTS,
        **SHARED_EXPERT,
    },
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        **EXPERT_KEYS,
        **EXPERT_LAYER_KEYS,
        **LINEAR_KEYS,
        "num_experts": "moe.n_experts",
        "shared_expert_intermediate_size": SHARED_WIDTH,
    },
    constants={**DECODER_CONSTANTS, "attention_bias": False},
    ignored=ROUTER_LOSS,
    beside={"use_sliding_window": False},
    defaults=DEFAULTS,
    completed=lambda content: with_layer_types(content, DEFAULTS),
    # models/qwen3_next: the q_proj of Qwen3NextAttention computes gates too.
    allowed={**SOFTMAX_ROUTER, **LINEAR_ALLOWED, **ONE_SHARED_EXPERT},
    turns_a_part=True,
    published={},
)
