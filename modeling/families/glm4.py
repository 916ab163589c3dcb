"""GLM-4-0414 (Zhipu AI, 2025): GLM-4 of 2024 with norms after its blocks too."""

from dataclasses import replace

from modeling.families.glm import FAMILY as GLM

OURS, THEIRS = "layers.{layer}", "model.layers.{layer}"
POST_NORMS = {
    f"{OURS}.attention_post_norm.weight": f"{THEIRS}.post_self_attn_layernorm.weight",
    f"{OURS}.feed_forward_post_norm.weight": f"{THEIRS}.post_mlp_layernorm.weight",
}

FAMILY = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    weights={**GLM.weights, **POST_NORMS},
    # models/glm4: as models/glm, with a norm of what each block adds to the residual stream.
    allowed={"norm_placement": ("both",)},
)
