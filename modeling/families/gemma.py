"""Gemma (arXiv:2403.08295): Llama with norms that add one, GeGLU, and an embedding scaled by the root of d_model."""

from collections.abc import Mapping
from typing import Any

from modeling.families.family import Family
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    HEAD_KEYS,
    O_BIAS,
    QKV_BIAS,
)

GELU = "gelu_pytorch_tanh"


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with the activation that the class computes.

    Published files name the exact GeLU in hidden_act, or nothing in hidden_activation, and mean the approximation.
    """
    old = {"hidden_act": "gelu", "hidden_activation": None}
    return {**content, **{key: GELU for key, value in old.items() if key in content and content[key] == value}}


FAMILY = Family(
    architecture="GemmaForCausalLM",
    weights={**DECODER, **ATTENTION, **QKV_BIAS, **O_BIAS, **FEED_FORWARD},
    keys={**DECODER_KEYS, **HEAD_KEYS, **FEED_FORWARD_KEYS, "attention_bias": ATTENTION_BIAS},
    constants={
        "hidden_act": GELU,
        "use_bidirectional_attention": None,
    },
    ignored={"hidden_activation": GELU},  # which version 4 reads instead of hidden_act
    beside={"hidden_activation": GELU},
    defaults={
        **DECODER_DEFAULTS,
        "attention_bias": False,
        "head_dim": 256,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 16,
        "tie_word_embeddings": True,
        "vocab_size": 256000,
    },
    completed=completed,
    equal=EQUAL_BIASES,
    derived={"embedding_scale": lambda config: config.d_model**0.5},
    # models/gemma: GemmaRMSNorm adds one to its weights.
    allowed={"activation": ("gelu_tanh",), "norm_adds_one": (True,)},
    published={},
)
