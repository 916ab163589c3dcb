"""GPT-2 (Radford et al. 2019) and GPT-3 (arXiv:2005.14165): learned positions, LayerNorm, no gates, biases."""

from collections.abc import Mapping
from typing import Any

from modeling.config import ModelConfig
from modeling.families.family import Family, Key
from modeling.families.packed import packed
from modeling.families.shared import ACTIVATION, with_bias

LAYER, HF_LAYER = "layers.{layer}.", "transformer.h.{layer}."
QKV = [f"{LAYER}attention.{each}" for each in "qkv"]
WEIGHTS = {
    "embed.weight": "transformer.wte.weight",
    "embed_positions.weight": "transformer.wpe.weight",
    **with_bias("final_norm", "transformer.ln_f"),
    "head.weight": "lm_head.weight",
    **with_bias(f"{LAYER}attention_norm", f"{HF_LAYER}ln_1"),
    f"{LAYER}attention.o_bias.bias": f"{HF_LAYER}attn.c_proj.bias",
    **with_bias(f"{LAYER}feed_forward_norm", f"{HF_LAYER}ln_2"),
    f"{LAYER}feed_forward.up.bias": f"{HF_LAYER}mlp.c_fc.bias",
    f"{LAYER}feed_forward.down_bias.bias": f"{HF_LAYER}mlp.c_proj.bias",
    **packed(f"{HF_LAYER}attn.c_attn.weight", *(f"{each}.weight" for each in QKV), transposed=True),
    **packed(f"{HF_LAYER}attn.c_attn.bias", *(f"{each}.bias" for each in QKV)),
    **packed(f"{HF_LAYER}attn.c_proj.weight", f"{LAYER}attention.o.weight", transposed=True),
    **packed(f"{HF_LAYER}mlp.c_fc.weight", f"{LAYER}feed_forward.up.weight", transposed=True),
    **packed(f"{HF_LAYER}mlp.c_proj.weight", f"{LAYER}feed_forward.down.weight", transposed=True),
}
DEFAULTS = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "tie_word_embeddings": True,
    "vocab_size": 50257,
}
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with n_inner, which is 4 n_embd where it is left out."""
    values = {**DEFAULTS, **content}
    width, d_model = values["n_inner"], values["n_embd"]
    return {**content, "n_inner": 4 * d_model if width is None and type(d_model) is int else width}


def published(d_model: int, n_layers: int, n_heads: int, max_positions: int = 1024) -> ModelConfig:
    """The config of a GPT-2 of this size."""
    return ModelConfig(
        family="gpt2",
        vocab_size=50257,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_ff=4 * d_model,
        tie_embeddings=True,
        norm="layer",
        qkv_bias=True,
        o_bias=True,
        ff_gated=False,
        ff_bias=True,
        activation="gelu_tanh",
        positions="learned",
        max_positions=max_positions,
        norm_eps=1e-5,
        embedding_dropout=0.1,
        residual_dropout=0.1,
        attention_dropout=0.1,
    )


FAMILY = Family(
    architecture="GPT2LMHeadModel",
    weights=WEIGHTS,
    prefix="transformer.",
    keys={
        "activation_function": ACTIVATION,
        "attn_pdrop": "attention_dropout",
        "embd_pdrop": "embedding_dropout",
        "initializer_range": "init_std",
        "layer_norm_epsilon": "norm_eps",
        "n_embd": "d_model",
        "n_head": "n_heads",
        "n_inner": "d_ff",
        "n_layer": "n_layers",
        "n_positions": "max_positions",
        "n_ctx": Key(ours=(), write=lambda config: config.max_positions, read=lambda _: {}),  # as older files have it
        "resid_pdrop": "residual_dropout",
        "tie_word_embeddings": "tie_embeddings",
        "vocab_size": "vocab_size",
    },
    constants={
        "add_cross_attention": False,
        "reorder_and_upcast_attn": False,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
    },
    ignored={},
    passed_over=frozenset(
        {
            *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
            *("summary_use_proj", "task_specific_params"),
        }
    ),
    defaults=DEFAULTS,
    aliases=ALIASES,
    completed=completed,
    length_key="n_positions",
    needs=("max_positions",),
    derived={"n_kv_heads": lambda config: config.n_heads},
    # models/gpt2: LayerNorm before each half, biases everywhere, no gate.
    allowed={
        "d_head": (None,),
        "ff_bias": (True,),
        "ff_gated": (False,),
        "norm": ("layer",),
        "o_bias": (True,),
        "positions": ("learned",),
        "qkv_bias": (True,),
    },
    published={
        "gpt2": published(768, 12, 12),
        "gpt2-medium": published(1024, 24, 16),
        "gpt2-large": published(1280, 36, 20),
        "gpt2-xl": published(1600, 48, 25),
        # As it is usually rebuilt: in the paper every other layer's attention is banded sparse (section 2.1).
        "GPT-3-175B": published(12288, 96, 96, max_positions=2048),
    },
)
