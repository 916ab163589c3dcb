"""BLOOM (Le Scao et al. 2022, arXiv:2211.05100): ALiBi, LayerNorm of the embedding too, no gates, biases."""

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.shared import head_packed_layers, with_bias


def published(d_model: int, n_layers: int, n_heads: int) -> ModelConfig:
    """The config of a BLOOM of this size."""
    return ModelConfig(
        family="bloom",
        vocab_size=250880,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_ff=4 * d_model,
        tie_embeddings=True,
        norm="layer",
        embedding_norm=True,
        qkv_bias=True,
        o_bias=True,
        ff_gated=False,
        ff_bias=True,
        activation="gelu_tanh",
        positions="alibi",
        norm_eps=1e-5,
    )


FAMILY = Family(
    architecture="BloomForCausalLM",
    weights={
        "embed.weight": "transformer.word_embeddings.weight",
        **with_bias("embed_norm", "transformer.word_embeddings_layernorm"),
        **with_bias("final_norm", "transformer.ln_f"),
        "head.weight": "lm_head.weight",
        **head_packed_layers("transformer.h.{layer}", "transformer.h.{layer}.self_attention"),
    },
    prefix="transformer.",
    keys={
        "attention_dropout": "attention_dropout",
        "hidden_dropout": "residual_dropout",
        "hidden_size": "d_model",
        "initializer_range": "init_std",
        "layer_norm_epsilon": "norm_eps",
        "n_head": "n_heads",
        "n_layer": "n_layers",
        "tie_word_embeddings": "tie_embeddings",
        "vocab_size": "vocab_size",
    },
    constants={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},
    ignored={},
    passed_over=frozenset(
        {
            *("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "n_inner", "offset_alibi"),
            *("skip_bias_add", "skip_bias_add_qkv", "unk_token_id"),
        }
    ),
    defaults={
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "hidden_size": 64,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "n_head": 8,
        "n_layer": 2,
        "seq_length": 2048,  # the class has no longest sequence; this is what the published models were trained on
        "tie_word_embeddings": True,
        "vocab_size": 250880,
    },
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    length_key="seq_length",
    derived={"n_kv_heads": lambda config: config.n_heads, "d_ff": lambda config: 4 * config.d_model},
    # models/bloom: LayerNorm before each half and of the embedding, biases everywhere, no gate, ALiBi.
    allowed={
        "activation": ("gelu_tanh",),
        "d_head": (None,),
        "embedding_norm": (True,),
        "ff_bias": (True,),
        "ff_gated": (False,),
        "norm": ("layer",),
        "o_bias": (True,),
        "positions": ("alibi",),
        "qkv_bias": (True,),
    },
    published={
        "bloom-560m": published(1024, 24, 16),
        "bloom-1b1": published(1536, 24, 16),
        "bloom-1b7": published(2048, 24, 16),
        "bloom-3b": published(2560, 30, 32),
        "bloom-7b1": published(4096, 30, 32),
        "bloom": published(14336, 70, 112),
    },
)
