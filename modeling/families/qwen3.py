"""Qwen3 (arXiv:2505.09388): a dense decoder whose heads' queries and keys are normed."""

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.qwen2 import DEFAULTS, completed
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    LAYER_TYPES,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
    USED_WINDOW_KEYS,
    WINDOW,
)


def published(d_model: int, n_layers: int, n_heads: int, d_ff: int, *, tie_embeddings: bool = False) -> ModelConfig:
    """The config of one of the published sizes."""
    return ModelConfig(
        family="qwen3",
        vocab_size=151936,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        d_head=128,
        d_ff=d_ff,
        tie_embeddings=tie_embeddings,
        qk_norm=True,
        rope_theta=1e6,
    )


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    weights={**DECODER, **ATTENTION, **QK_NORM, **QKV_BIAS, **O_BIAS, **FEED_FORWARD},
    keys={
        **DECODER_KEYS,
        **HEAD_KEYS,
        **FEED_FORWARD_KEYS,
        "attention_bias": ATTENTION_BIAS,
        "sliding_window": "sliding_window",
        "layer_types": LAYER_TYPES,
        **USED_WINDOW_KEYS,
    },
    constants=DECODER_CONSTANTS,
    ignored={},
    defaults={**DEFAULTS, "attention_bias": False, "head_dim": 128},
    completed=completed,
    equal=EQUAL_BIASES,
    # models/qwen3: q_norm and k_norm are always there.
    allowed={"qk_norm": (True,)},
    at_least=WINDOW,
    published={
        "Qwen3-0.6B": published(1024, 28, 16, 3072, tie_embeddings=True),
        "Qwen3-8B": published(4096, 36, 32, 12288),
        "Qwen3-32B": published(5120, 64, 64, 25600),
    },
)
