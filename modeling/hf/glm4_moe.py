"""GLM-4.5 (arXiv:2508.06471): sigmoid routing with a selection bias, shared experts, leading dense layers."""

from typing import Any

from modeling.config import ModelConfig, MoEConfig
from modeling.hf.common import DECODER, EXPERTS, FEED_FORWARD, QK_NORM, decoder_config

ARCHITECTURE = "Glm4MoeForCausalLM"
WEIGHTS = {
    **DECODER,
    **QK_NORM,
    **FEED_FORWARD,
    **EXPERTS,
    "layers.{layer}.feed_forward.router.bias": "model.layers.{layer}.mlp.gate.e_score_correction_bias",
    "layers.{layer}.feed_forward.shared.gate.weight": "model.layers.{layer}.mlp.shared_experts.gate_proj.weight",
    "layers.{layer}.feed_forward.shared.up.weight": "model.layers.{layer}.mlp.shared_experts.up_proj.weight",
    "layers.{layer}.feed_forward.shared.down.weight": "model.layers.{layer}.mlp.shared_experts.down_proj.weight",
}


def family_config(config: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    """config.json without what every model has (modeling.hf.convert.hf_config)."""
    common = decoder_config(config)
    return {
        **common,
        "attention_bias": False,
        "first_k_dense_replace": moe.n_dense_layers,
        "moe_intermediate_size": moe.d_ff,
        "n_group": 1,
        "n_routed_experts": moe.n_experts,
        "n_shared_experts": moe.n_shared_experts,
        "norm_topk_prob": moe.normalize_top_k,
        "num_experts_per_tok": moe.top_k,
        "num_nextn_predict_layers": 0,  # no multi-token prediction modules
        "output_router_logits": False,
        "rope_parameters": {**common["rope_parameters"], "partial_rotary_factor": 1.0},  # the class defaults to 0.5
        "routed_scaling_factor": moe.routed_scale,
        "topk_group": 1,
        "use_qk_norm": config.qk_norm,
    }
