"""What the families share: the names of a Llama-like decoder's weights, and the common part of config.json."""

from dataclasses import dataclass
from typing import Any

from modeling.config import ModelConfig

# Our name -> the name in transformers' files. {layer} and {expert} stand for numbers; a name with {expert} holds one
# expert of our stack. Shapes are equal: transformers' linear layers are (out, in) as ours are.
DECODER = {
    "embed.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "layers.{layer}.attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "layers.{layer}.attention.q.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers.{layer}.attention.k.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers.{layer}.attention.v.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers.{layer}.attention.o.weight": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers.{layer}.feed_forward_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
}
QK_NORM = {
    "layers.{layer}.attention.q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers.{layer}.attention.k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
}
FEED_FORWARD = {
    "layers.{layer}.feed_forward.gate.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.{layer}.feed_forward.up.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.{layer}.feed_forward.down.weight": "model.layers.{layer}.mlp.down_proj.weight",
}
EXPERTS = {
    "layers.{layer}.feed_forward.router.weight": "model.layers.{layer}.mlp.gate.weight",
    "layers.{layer}.feed_forward.experts.gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "layers.{layer}.feed_forward.experts.up": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "layers.{layer}.feed_forward.experts.down": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The tokenizer's ids of its special tokens; None where it has none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


def decoder_config(config: ModelConfig) -> dict[str, Any]:
    """The keys of config.json that every family has."""
    return {
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.d_model,
        "initializer_range": config.init_std,
        "intermediate_size": config.d_ff,
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "num_key_value_heads": config.n_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tie_embeddings,
        "vocab_size": config.vocab_size,
    }
