"""Granite 3.0 with experts (granitemoe of transformers): factors on embeddings, scores, residuals and logits."""

from modeling.config import ModelConfig
from modeling.families.family import Family
from modeling.families.granite import MULTIPLIERS
from modeling.families.packed import packed
from modeling.families.shared import (
    ATTENTION,
    ATTENTION_BIAS,
    DECODER,
    DECODER_DEFAULTS,
    DECODER_KEYS,
    EQUAL_BIASES,
    EXPERTS_ALONE,
    O_BIAS,
    QKV_BIAS,
    ROUTER_LOSS,
    SOFTMAX_ROUTER,
)
from modeling.moe_config import MoEConfig, NoBalance

EXPERTS = "model.layers.{layer}.block_sparse_moe"


def published(d_model: int, n_layers: int, n_heads: int, n_experts: int) -> ModelConfig:
    """The config of one of the published sizes."""
    return ModelConfig(
        family="granitemoe",
        vocab_size=49155,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        d_ff=512,
        tie_embeddings=True,
        embedding_scale=12.0,
        residual_scale=0.22,
        logit_divisor=6.0,
        score_scale=0.015625,
        attention_dropout=0.1,
        moe=MoEConfig(n_experts=n_experts, top_k=8, d_ff=512, balance=NoBalance()),
    )


FAMILY = Family(
    architecture="GraniteMoeForCausalLM",
    weights={
        **DECODER,
        **ATTENTION,
        **QKV_BIAS,
        **O_BIAS,
        "layers.{layer}.feed_forward.router.weight": f"{EXPERTS}.router.layer.weight",
        **packed(
            f"{EXPERTS}.input_linear.weight",
            "layers.{layer}.feed_forward.experts.gate",
            "layers.{layer}.feed_forward.experts.up",
        ),
        "layers.{layer}.feed_forward.experts.down": f"{EXPERTS}.output_linear.weight",
    },
    keys={
        **DECODER_KEYS,
        "attention_bias": ATTENTION_BIAS,
        **MULTIPLIERS,
        "intermediate_size": EXPERTS_ALONE,
        "num_experts_per_tok": "moe.top_k",
        "num_local_experts": "moe.n_experts",
    },
    constants={"hidden_act": "silu", "position_embedding_type": "rope"},  # the latter is a key of version 4
    ignored=ROUTER_LOSS,
    defaults={
        **DECODER_DEFAULTS,
        **dict.fromkeys(MULTIPLIERS, 1.0),
        "attention_bias": False,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": None,
        "num_local_experts": 8,
        "vocab_size": 32000,
    },
    equal=EQUAL_BIASES,
    # models/granitemoe: d_model / n_heads channels a head; the softmax is over the chosen logits.
    allowed={
        "d_head": (None,),
        "moe.n_dense_layers": (0,),
        "moe.normalize_top_k": (True,),
        **SOFTMAX_ROUTER,
    },
    published={
        "granite-3.0-1b-a400m": published(1024, 24, 16, 32),
        "granite-3.0-3b-a800m": published(1536, 32, 24, 40),
    },
)
