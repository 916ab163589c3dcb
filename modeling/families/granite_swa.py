"""Granite with windows by layer, sinks, and layers without rotation (granite_swa of transformers)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from modeling.families.family import Key
from modeling.families.granite import FAMILY as GRANITE
from modeling.families.shared import ALWAYS_MASKED, LAYER_TYPES, WINDOW, types_from_first_full
from modeling.families.values import checked

SINKS = {"layers.{layer}.attention.sinks.weight": "model.layers.{layer}.self_attn.sinks"}
WINDOW_DEFAULTS = {"layer_rope_theta": None, "layer_types": None, "sliding_window": 128}


def types_completed(content: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """The content with layer_types. Where it has none, the first of each four layers has no window."""
    return {**content, "layer_types": types_from_first_full({**defaults, **content})}


def bases(listed: Any) -> Mapping[str, Any]:
    """The fields that a list of each layer's rotary base sets. ValueError unless it holds one base, and zeros.

    In a layer with base 0 nothing is rotated. None means the same base in all layers.
    """
    if listed is None:
        return {"nope_layers": ()}
    if not isinstance(listed, list):
        raise ValueError("it must be a list")
    found = [checked(each, float) for each in listed]
    turning = sorted({*found} - {0.0})
    if len(turning) > 1:
        raise ValueError("it must hold one base, and 0 for layers without rotation")
    still = tuple(layer for layer, base in enumerate(found) if base == 0)
    return {"nope_layers": still, **({"rope_theta": turning[0]} if turning else {})}


WINDOW_KEYS: dict[str, str | Key] = {
    "layer_rope_theta": Key(
        ours=("nope_layers",),
        write=lambda config: [
            0.0 if layer in config.nope_layers else config.rope_theta for layer in range(config.n_layers)
        ],
        read=bases,
    ),
    "sliding_window": ALWAYS_MASKED,
    "layer_types": LAYER_TYPES,
}
DEFAULTS = {
    **GRANITE.defaults,
    **WINDOW_DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_attention_heads": 20,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "vocab_size": 100352,
}

FAMILY = replace(
    GRANITE,
    architecture="GraniteSWAForCausalLM",
    since=5,
    weights={**GRANITE.weights, **SINKS},
    keys={**GRANITE.keys, **WINDOW_KEYS},
    defaults=DEFAULTS,
    completed=lambda content: types_completed(content, DEFAULTS),
    # models/granite_swa: d_model / n_heads channels a head; both masks are made, even where no layer uses one of them.
    allowed={**GRANITE.allowed, "sinks": (True,)},
    at_least=WINDOW,
    published={},
)
