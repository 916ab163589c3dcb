"""GLM-4.7-Flash: DeepSeek-V3's latent attention and experts, and a list of the layers that have experts."""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from modeling.config import ModelConfig
from modeling.families.deepseek_v3 import FAMILY as V3
from modeling.families.family import Family, Key
from modeling.families.shared import DECODER_DEFAULTS, MTP_COPIES, is_count, whole_number

DEFAULTS = {
    **DECODER_DEFAULTS,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "kv_lora_rank": 512,
    "mlp_layer_types": None,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "num_nextn_predict_layers": 0,  # the class does not know the key; the published files have it
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}


def completed(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with mlp_layer_types. Where it has none, only the first layer is dense."""
    return {**content, "mlp_layer_types": kinds_of_leading({**DEFAULTS, **content}, 1)}


def kinds_of_leading(values: Mapping[str, Any], n_leading: Any) -> Any:
    """``mlp_layer_types`` of a config.json. Where it is left out, ``n_leading`` layers at the beginning are dense.

    It is empty where the number of layers, or ``n_leading``, is none: the rule of that key refuses it.
    """
    kinds, n_layers = values["mlp_layer_types"], values["num_hidden_layers"]
    if kinds is None:
        is_told = type(n_leading) is int and is_count(n_layers)
        kinds = layer_kinds(n_layers, {*range(min(n_leading, n_layers))}) if is_told else []
    return kinds


def layer_kinds(n_layers: int, dense: set[int]) -> list[str]:
    """The list, as transformers has it, of each layer's kind of feed-forward layer: dense or sparse."""
    return ["dense" if layer in dense else "sparse" for layer in range(n_layers)]


def dense_layers(config: ModelConfig) -> list[int]:
    """The layers without experts."""
    return [layer for layer in range(config.n_layers) if not config.is_moe_layer(layer)]


def n_leading(config: ModelConfig) -> int:
    """The number of layers before the first with experts."""
    return sum(1 for _ in takewhile(lambda layer: not config.is_moe_layer(layer), range(config.n_layers)))


def dense_of(kinds: Any) -> Mapping[str, Any]:
    """The fields for a list of layer kinds. ValueError where it has other kinds."""
    if not isinstance(kinds, list) or not all(isinstance(each, str) and each in ("dense", "sparse") for each in kinds):
        raise ValueError("it must be a list of dense and sparse")
    return {"moe.dense_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")}


MLP_LAYER_TYPES = Key(
    ours=("moe.n_dense_layers", "moe.dense_layers"),
    write=lambda config: layer_kinds(config.n_layers, {*dense_layers(config)}),
    read=dense_of,
)
# The class reads the list; other programs that read the files use this number.
N_LEADING = Key(ours=(), write=n_leading, read=whole_number)

FAMILY = Family(
    architecture="Glm4MoeLiteForCausalLM",
    since=5,
    weights=V3.weights,
    copies=MTP_COPIES,
    same=V3.same,
    keys={
        **V3.keys,
        "first_k_dense_replace": N_LEADING,
        "mlp_layer_types": MLP_LAYER_TYPES,
    },
    constants=V3.constants,
    ignored={"output_router_logits": False},
    defaults=DEFAULTS,
    aliases={"num_local_experts": "n_routed_experts"},
    completed=completed,
    # models/glm4_moe_lite: the router is sigmoid with a selection bias and takes a top 2 within each group of experts;
    # shared_experts are always built; only causal masks.
    allowed=V3.allowed,
    at_least=V3.at_least,
    may_lack=V3.may_lack,
    published={},
)
