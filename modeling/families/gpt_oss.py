"""gpt-oss (arXiv:2508.10925): windows in every other layer, sinks, biases everywhere, experts with clamped gates."""

from collections.abc import Mapping
from typing import Any

from modeling.config import ModelConfig
from modeling.families.family import Family, Key, moe_of
from modeling.families.packed import packed
from modeling.families.shared import (
    ALWAYS_MASKED,
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    EXPERTS_ALONE,
    HEAD_KEYS,
    LAYER_TYPES,
    O_BIAS,
    QKV_BIAS,
    ROUTER_LOSS,
    SOFTMAX_ROUTER,
    WINDOW,
    types_by_interval,
    whole_number,
)
from modeling.moe_config import MoEConfig, NoBalance
from modeling.rope_scaling import YarnScaling

OURS, THEIRS = "layers.{layer}.feed_forward", "model.layers.{layer}.mlp"


def widths(config: ModelConfig) -> int:
    """One group for each channel of an expert: the rows of its gate and its value alternate."""
    return moe_of(config).d_ff


GPT_OSS = {
    "layers.{layer}.attention.sinks.weight": "model.layers.{layer}.self_attn.sinks",
    f"{OURS}.router.weight": f"{THEIRS}.router.weight",
    f"{OURS}.router.logit_bias": f"{THEIRS}.router.bias",
    f"{OURS}.experts.down_bias": f"{THEIRS}.experts.down_proj_bias",
    **packed(f"{THEIRS}.experts.down_proj", f"{OURS}.experts.down", transposed=True),
    **packed(
        f"{THEIRS}.experts.gate_up_proj",
        f"{OURS}.experts.gate",
        f"{OURS}.experts.up",
        groups=widths,
        transposed=True,
    ),
    **packed(
        f"{THEIRS}.experts.gate_up_proj_bias", f"{OURS}.experts.gate_bias", f"{OURS}.experts.up_bias", groups=widths
    ),
}
DEFAULTS = {
    **DECODER_DEFAULTS,
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": None,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "vocab_size": 201088,
}
SCALING = YarnScaling(factor=32.0, original_seq_len=4096, truncate=False)
ROPE = {  # the class's rotary positions where a file gives none
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types and rotary positions.

    Where it has none, every second layer has no window, and frequencies are scaled by YaRN. An empty rope_scaling is
    none, an empty rope_parameters are plain positions.
    """
    types = types_by_interval({**DEFAULTS, **content}, 2)
    is_told = bool(content.get("rope_scaling")) or content.get("rope_parameters") is not None  # as the class has it
    return {**content, "layer_types": types, **({} if is_told else {"rope_parameters": ROPE})}


def published(n_layers: int, n_experts: int) -> ModelConfig:
    """The config of a published size; sizes differ only in layers and experts."""
    return ModelConfig(
        family="gpt_oss",
        vocab_size=201088,
        d_model=2880,
        n_layers=n_layers,
        n_heads=64,
        n_kv_heads=8,
        d_head=64,
        d_ff=2880,
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        sliding_window=128,
        full_attention_layers=tuple(range(1, n_layers, 2)),
        rope_theta=150000.0,
        rope_scaling=SCALING,
        norm_eps=1e-5,
        moe=MoEConfig(
            n_experts=n_experts,
            top_k=4,
            d_ff=2880,
            expert_bias=True,
            swiglu_limit=7.0,
            logit_bias=True,
            balance=NoBalance(),
        ),
    )


FAMILY = Family(
    architecture="GptOssForCausalLM",
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **O_BIAS, **GPT_OSS},
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        "attention_bias": ATTENTION_BIAS,
        "intermediate_size": EXPERTS_ALONE,
        "num_local_experts": "moe.n_experts",
        "num_experts_per_tok": "moe.top_k",
        "swiglu_limit": "moe.swiglu_limit",
        "sliding_window": ALWAYS_MASKED,
        "layer_types": LAYER_TYPES,
        "experts_per_token": Key(ours=(), write=lambda config: moe_of(config).top_k, read=whole_number),
        "initial_context_length": Key(ours=(), write=lambda config: SCALING.original_seq_len, read=whole_number),
    },
    constants={**DECODER_CONSTANTS, "swiglu_alpha": 1.702},
    ignored=ROUTER_LOSS,
    defaults={**DEFAULTS, "experts_per_token": 4, "initial_context_length": 4096},
    aliases={"num_experts": "num_local_experts"},
    completed=completed,
    equal=EQUAL_BIASES,
    tells_plain_rope=True,
    # models/gpt_oss: every projection of the experts and the router's has a bias; softmax over the chosen logits.
    allowed={
        "sinks": (True,),
        "moe.expert_bias": (True,),
        "moe.logit_bias": (True,),
        "moe.normalize_top_k": (True,),
        **SOFTMAX_ROUTER,
    },
    at_least=WINDOW,
    needs=("moe.swiglu_limit",),
    published={"gpt-oss-20b": published(24, 32), "gpt-oss-120b": published(36, 128)},
)
