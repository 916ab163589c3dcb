"""Qwen3-MoE (arXiv:2505.09388): QK norm, softmax routing, leading dense layers if wanted."""

from typing import Any

from modeling.config import ModelConfig, MoEConfig
from modeling.hf.common import DECODER, EXPERTS, FEED_FORWARD, QK_NORM, decoder_config

ARCHITECTURE = "Qwen3MoeForCausalLM"
WEIGHTS = {**DECODER, **QK_NORM, **FEED_FORWARD, **EXPERTS}


def family_config(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """config.json without what every model has (modeling.hf.convert.hf_config)."""
    return {
        **decoder_config(config),
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.n_dense_layers)),
        "moe_intermediate_size": moe.d_ff,
        "norm_topk_prob": moe.normalize_top_k,
        "num_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,  # transformers' balance loss is over the batch, not the sequence
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
    }
