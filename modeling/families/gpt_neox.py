"""GPT-NeoX (Black et al. 2022, arXiv:2204.06745) and Pythia (arXiv:2304.01373): parallel blocks, LayerNorm, biases."""

from collections.abc import Mapping
from typing import Any

from modeling.config import ActivationName, ModelConfig
from modeling.families.family import Family, Key
from modeling.families.shared import (
    ACTIVATION,
    ATTENTION_BIAS,
    EQUAL_BIASES,
    head_packed_layers,
    number,
    with_bias,
)

DEFAULTS = {
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout": 0.0,
    "hidden_size": 6144,
    "initializer_range": 0.02,
    "intermediate_size": 24576,
    "layer_norm_eps": 1e-5,
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50432,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with the rotary positions under their usual names, which the class does not read."""
    values = {**DEFAULTS, **content}
    return {**content, "rope_theta": values["rotary_emb_base"], "partial_rotary_factor": values["rotary_pct"]}


def published(
    d_model: int, n_layers: int, n_heads: int, *, vocab_size: int = 50304, activation: ActivationName = "gelu"
) -> ModelConfig:
    """The config of a model of this size."""
    return ModelConfig(
        family="gpt_neox",
        vocab_size=vocab_size,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_ff=4 * d_model,
        parallel_block=True,
        norm="layer",
        qkv_bias=True,
        o_bias=True,
        ff_gated=False,
        ff_bias=True,
        activation=activation,
        rope_fraction=0.25,
        norm_eps=1e-5,
    )


FAMILY = Family(
    architecture="GPTNeoXForCausalLM",
    weights={
        "embed.weight": "gpt_neox.embed_in.weight",
        **with_bias("final_norm", "gpt_neox.final_layer_norm"),
        "head.weight": "embed_out.weight",
        **head_packed_layers("gpt_neox.layers.{layer}", "gpt_neox.layers.{layer}.attention"),
    },
    prefix="gpt_neox.",
    keys={
        "attention_bias": ATTENTION_BIAS,
        "attention_dropout": "attention_dropout",
        "hidden_act": ACTIVATION,
        "hidden_dropout": Key(  # of the embedded tokens too
            ours=("residual_dropout", "embedding_dropout"),
            write=lambda config: config.residual_dropout,
            read=lambda probability: {"residual_dropout": probability, "embedding_dropout": probability},
        ),
        "hidden_size": "d_model",
        "initializer_range": "init_std",
        "intermediate_size": "d_ff",
        "layer_norm_eps": "norm_eps",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "rotary_emb_base": Key(ours=(), write=lambda config: config.rope_theta, read=number),  # read as rope_theta
        "rotary_pct": Key(ours=(), write=lambda config: config.rope_fraction, read=number),
        "tie_word_embeddings": "tie_embeddings",
        "use_parallel_residual": "parallel_block",
        "vocab_size": "vocab_size",
    },
    constants={},
    ignored={"classifier_dropout": 0.0},
    # The class is causal either way, and takes dropout from the newer names.
    passed_over=frozenset({"attention_probs_dropout_prob", "hidden_dropout_prob", "is_decoder"}),
    defaults=DEFAULTS,
    completed=completed,
    turns_a_part=True,
    derived={"n_kv_heads": lambda config: config.n_heads},
    equal=(*EQUAL_BIASES, ("residual_dropout", "embedding_dropout")),
    # models/gpt_neox: LayerNorm before each half, no gate, biases of the feed-forward layer.
    allowed={"d_head": (None,), "ff_bias": (True,), "ff_gated": (False,), "norm": ("layer",)},
    published={
        "pythia-70m": published(512, 6, 8),
        "pythia-160m": published(768, 12, 12),
        "pythia-410m": published(1024, 24, 16),
        "pythia-1b": published(2048, 16, 8),
        "pythia-1.4b": published(2048, 24, 16),
        "pythia-2.8b": published(2560, 32, 32),
        "pythia-6.9b": published(4096, 32, 32, vocab_size=50432),
        "pythia-12b": published(5120, 36, 40, vocab_size=50688),
        "gpt-neox-20b": published(6144, 44, 64, vocab_size=50432, activation="gelu_tanh"),
    },
)
