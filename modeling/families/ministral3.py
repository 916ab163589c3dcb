"""Ministral 3 (Mistral AI, December 2025): Mistral with YaRN, and queries that grow with their positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modeling.families.mistral import FAMILY as MISTRAL

ROPE = {  # the class's default where a file has no rope_parameters; it then ignores rope_theta
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# Of images, and how their features enter: keys of the published models.
AROUND = frozenset(
    {
        *("image_token_index", "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size"),
        "vision_feature_layer",
    }
)


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with rotary positions.

    Where it has none, they are the class's own; where it has some without a base, that is the one of all classes.
    """
    is_told = content.get("rope_scaling") or content.get("rope_parameters") is not None
    return {"rope_theta": 10000.0, **content} if is_told else {**content, "rope_parameters": ROPE}


FAMILY = replace(
    MISTRAL,
    architecture="Ministral3ForCausalLM",
    within="mistral3",
    prefixes_of_text={
        "model.language_model.": "model.",
        "language_model.model.": "model.",  # of published files, and of those that transformers saves
        "language_model.lm_head.": "lm_head.",
    },
    around=AROUND,
    unread=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
    since=5,
    defaults={
        **MISTRAL.defaults,
        "head_dim": 128,
        "num_hidden_layers": 34,
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE["rope_theta"],
        "sliding_window": None,
        "vocab_size": 131072,
    },
    completed=completed,
    # models/ministral3: get_llama_4_attn_scale needs keys that the class knows beside yarn's alone.
    rope_scalings=("yarn",),
    rope_passed_over=frozenset({"max_position_embeddings"}),
    scales_queries=True,
    published={},
)
