"""Gemma 2 (arXiv:2408.00118): capped scores and logits, norms before and after blocks, windows in every other layer."""

from collections.abc import Mapping
from typing import Any

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.gemma3_text import DEFAULTS as GEMMA3_DEFAULTS
from modeling.families.gemma3_text import FAMILY as GEMMA3
from modeling.families.gemma3_text import NORMS
from modeling.families.shared import ATTENTION, DECODER, FEED_FORWARD, WINDOW, types_by_interval

NOT_OURS = ("rope_local_base_freq", "sliding_window_pattern")
DEFAULTS = {
    **{key: value for key, value in GEMMA3_DEFAULTS.items() if key not in NOT_OURS},
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types. Where it has none, every second layer has no window."""
    return {**content, "layer_types": types_by_interval({**DEFAULTS, **content}, 2)}


def published(
    d_model: int, n_layers: int, n_heads: int, d_ff: int, *, d_head: int = 256, score_channels: float = 256.0
) -> ModelConfig:
    """The config of one of the published sizes."""
    return ModelConfig(
        family="gemma2",
        vocab_size=256000,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads // 2,
        d_head=d_head,
        d_ff=d_ff,
        tie_embeddings=True,
        norm_placement="both",
        norm_adds_one=True,
        activation="gelu_tanh",
        embedding_scale=d_model**0.5,
        score_channels=score_channels,
        score_cap=50.0,
        logit_cap=30.0,
        sliding_window=4096,
        full_attention_layers=tuple(range(1, n_layers, 2)),
    )


FAMILY = Family(
    architecture="Gemma2ForCausalLM",
    weights={**DECODER, **NORMS, **ATTENTION, **FEED_FORWARD},
    keys={
        **{key: ours for key, ours in GEMMA3.keys.items() if key not in NOT_OURS},
        "attn_logit_softcapping": "score_cap",
        "final_logit_softcapping": "logit_cap",
    },
    constants={
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": None,
    },
    ignored={},
    # hidden_activation and sliding_window count
    passed_over=frozenset({"cache_implementation", "hidden_act", "sliding_window_size"}),
    defaults=DEFAULTS,
    completed=completed,
    heads_divide_d_model=True,
    whole=("score_channels",),
    derived=GEMMA3.derived,
    # models/gemma2: Gemma2RMSNorm adds one to its weights.
    allowed={"activation": ("gelu_tanh",), "norm_adds_one": (True,), "norm_placement": ("both",)},
    at_least=WINDOW,
    published={
        "gemma-2-2b": published(2304, 26, 8, 9216),
        "gemma-2-9b": published(3584, 42, 16, 14336),
        "gemma-2-27b": published(4608, 46, 32, 36864, d_head=128, score_channels=144.0),
    },
)
