"""Mixtral (arXiv:2401.04088): every layer has experts, chosen by a softmax whose top_k weights sum to one."""

from typing import Any

from modeling.config import ModelConfig, MoEConfig
from modeling.hf.common import DECODER, decoder_config

ARCHITECTURE = "MixtralForCausalLM"
WEIGHTS = {
    **DECODER,
    "layers.{layer}.feed_forward.router.weight": "model.layers.{layer}.block_sparse_moe.gate.weight",
    "layers.{layer}.feed_forward.experts.gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    "layers.{layer}.feed_forward.experts.up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    "layers.{layer}.feed_forward.experts.down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}


def family_config(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """config.json without what every model has (modeling.hf.convert.hf_config)."""
    return {
        **decoder_config(config),
        "intermediate_size": moe.d_ff,
        "num_experts_per_tok": moe.top_k,
        "num_local_experts": moe.n_experts,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,  # transformers' balance loss is over the batch, not the sequence
        "router_jitter_noise": 0.0,
        "sliding_window": config.sliding_window,
    }
