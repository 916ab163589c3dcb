"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905): queries, keys and values from one matrix in the files."""

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.packed import packed
from modeling.families.shared import (
    ATTENTION,
    DECODER,
    DECODER_CONSTANTS,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    FEED_FORWARD,
    FEED_FORWARD_KEYS,
    WINDOW,
)

FAMILY = Family(
    architecture="Phi3ForCausalLM",
    weights={
        **DECODER,
        **ATTENTION,
        **FEED_FORWARD,
        **packed(
            "model.layers.{layer}.self_attn.qkv_proj.weight",
            "layers.{layer}.attention.q.weight",
            "layers.{layer}.attention.k.weight",
            "layers.{layer}.attention.v.weight",
        ),
        **packed(
            "model.layers.{layer}.mlp.gate_up_proj.weight",
            "layers.{layer}.feed_forward.gate.weight",
            "layers.{layer}.feed_forward.up.weight",
        ),
    },
    keys={**DECODER_KEYS, **FEED_FORWARD_KEYS, "sliding_window": "sliding_window"},
    constants={**DECODER_CONSTANTS, "attention_bias": False},
    # Dropout is of training; the original length counts where frequencies are scaled.
    ignored={"embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096},
    defaults={
        **DECODER_DEFAULTS,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "vocab_size": 32064,
    },
    turns_a_part=True,
    scales_rope=False,  # the class knows longrope alone, which is not implemented
    # models/phi3: d_model / n_heads channels a head; one mask for all layers, sliding where sliding_window is set.
    allowed={"d_head": (None,)},
    at_least=WINDOW,
    published={
        "Phi-3-mini-4k": ModelConfig(
            family="phi3",
            vocab_size=32064,
            d_model=3072,
            n_layers=32,
            n_heads=32,
            n_kv_heads=32,
            d_ff=8192,
            sliding_window=2047,
            norm_eps=1e-5,
        ),
        "Phi-4": ModelConfig(
            family="phi3",
            vocab_size=100352,
            d_model=5120,
            n_layers=40,
            n_heads=40,
            n_kv_heads=10,
            d_ff=17920,
            rope_theta=250000.0,
            norm_eps=1e-5,
        ),
    },
)
