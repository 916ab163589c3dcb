"""What the `transformers` class of each model family can express, read from transformers 5.23.

A model that an export could not turn into its family's class is refused before it is trained.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.config.words import join_or, show
from modeling.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family's limits; a key that is not named is free."""

    has_experts: bool
    allowed: Mapping[str, tuple[Any, ...]]  # dotted key below `model`: the values that the class can express
    at_least: Mapping[str, int] = field(default_factory=dict)
    heads_divide_d_model: bool = False  # also where d_head is given


_SOFTMAX_ROUTER: dict[str, tuple[Any, ...]] = {
    "moe.score": ("softmax",),
    "moe.routed_scale": (1.0,),
    "moe.n_shared_experts": (0,),
    "moe.balance.name": ("sequence_aux", "none"),  # the router has no selection bias
}

# cache_utils.py keeps the last sliding_window - 1 keys as [-sliding_window + 1 :], which at 1 is all of them.
_WINDOW = {"sliding_window": 2}

FAMILIES: dict[str, Family] = {
    # models/llama: LlamaConfig itself demands hidden_size % num_attention_heads == 0.
    "llama": Family(
        has_experts=False,
        allowed={"qk_norm": (False,), "sliding_window": (None,)},
        heads_divide_d_model=True,
    ),
    # models/mixtral: every layer has experts; MixtralTopKRouter always renormalises the chosen weights.
    "mixtral": Family(
        has_experts=True,
        allowed={
            "qk_norm": (False,),
            "moe.n_dense_layers": (0,),
            "moe.normalize_top_k": (True,),
            **_SOFTMAX_ROUTER,
        },
        at_least=_WINDOW,
    ),
    # models/qwen3_moe: q_norm and k_norm are always there; mlp_only_layers names the dense layers; one mask for all
    # layers, sliding where use_sliding_window is set; norm_topk_prob may be either.
    "qwen3_moe": Family(has_experts=True, allowed={"qk_norm": (True,), **_SOFTMAX_ROUTER}, at_least=_WINDOW),
    # models/glm4_moe: Glm4MoeTopkRouter is sigmoid with a selection bias and takes a top 2 within each group of
    # experts; shared_experts are always built; only causal masks; first_k_dense_replace counts the dense layers.
    "glm4_moe": Family(
        has_experts=True,
        allowed={"sliding_window": (None,), "moe.score": ("sigmoid",)},
        at_least={"moe.n_experts": 2, "moe.n_shared_experts": 1},
    ),
}


def check_family(model: ModelConfig) -> Iterator[str]:
    """One line for each thing in ``model`` that its family's `transformers` class cannot express."""
    family = FAMILIES[model.family]
    told = f"with model.family={model.family}, whose `transformers` class"
    if family.has_experts and model.moe is None:
        yield f"model.moe=null is not possible {told} has experts; try model.moe.n_experts=8, or model.family=llama"
    if not family.has_experts and model.moe is not None:
        yield (
            f"model.moe.n_experts={model.moe.n_experts} is not possible {told} has no experts; try model.moe=null, or "
            f"model.family={join_or([name for name, each in FAMILIES.items() if each.has_experts])}"
        )
    for key, allowed in family.allowed.items():
        for value in _values(model, key):
            if value not in allowed:
                tries = join_or([_plain(each) for each in allowed])
                yield f"model.{key}={_plain(value)} is not possible {told} cannot express it; try {tries}"
    for key, minimum in family.at_least.items():
        for value in _values(model, key):
            if value is not None and value < minimum:
                yield f"model.{key}={value} is not possible {told} needs at least {minimum}; try {minimum}"
    if family.heads_divide_d_model and model.d_head is not None and model.d_model % max(1, model.n_heads):
        near = -(-model.d_model // model.n_heads) * model.n_heads
        yield (
            f"model.d_model={model.d_model} must be a multiple of model.n_heads={model.n_heads} {told} demands it "
            f"even where model.d_head={model.d_head} is given; try {near}"
        )


def _values(model: ModelConfig, key: str) -> Iterator[Any]:
    """The value at a dotted key below the model, or nothing where the model has no experts to ask about."""
    section, _, name = key.rpartition(".")
    value: Any = model
    for part in section.split(".") if section else ():
        value = getattr(value, part, None)
    if value is not None:
        yield getattr(value, name)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
