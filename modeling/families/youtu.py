"""Youtu-LLM (arXiv:2512.24618): Llama with DeepSeek-V3's latent attention."""

from collections.abc import Mapping
from typing import Any

from modeling.families.deepseek_v3 import FAMILY as V3
from modeling.families.deepseek_v3 import LATENT_ATTENTION
from modeling.families.family import Family, Key
from modeling.families.shared import (
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    number,
)
from modeling.families.values import checked

OF_LATENTS = (
    "head_dim",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
DEFAULTS = {
    **DECODER_DEFAULTS,
    "embedding_initializer_range": None,
    "hidden_size": 2048,
    "initializer_range": None,
    "intermediate_size": 6144,
    "kv_lora_rank": 512,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 16,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "tie_word_embeddings": True,
    "v_head_dim": 128,
    "vocab_size": 128256,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with initializer_range. Where it is left out or null, it follows from the width."""
    values = {**DEFAULTS, **content}
    deviation = values["initializer_range"]
    if deviation is None:
        deviation = deviation_of(values["hidden_size"])
    return {**content, "initializer_range": deviation}


def deviation_of(width: Any) -> float:
    """What the class takes for initializer_range in a model so wide; 0.02 where no model has that width."""
    try:
        return 2 / (5 * checked(width, float)) ** 0.5 if checked(width, int) > 0 else 0.02
    except ValueError:
        return 0.02


FAMILY = Family(
    architecture="YoutuForCausalLM",
    since=5,
    weights={**DECODER, **LATENT_ATTENTION, **FEED_FORWARD},
    keys={
        **DECODER_KEYS,
        **FEED_FORWARD_KEYS,
        **{key: V3.keys[key] for key in OF_LATENTS},
        # of the embedding's first weights, which begin as others do here
        "embedding_initializer_range": Key(
            ours=(),
            write=lambda config: config.init_std,
            read=lambda deviation: {} if deviation is None else number(deviation),
        ),
    },
    same=V3.same,
    constants={**DECODER_CONSTANTS, "attention_bias": False, "rope_interleave": True},
    ignored={},
    defaults=DEFAULTS,
    completed=completed,
    # models/youtu: only causal masks.
    allowed={},
    published={},
)
