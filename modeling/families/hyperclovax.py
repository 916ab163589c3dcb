"""HyperCLOVA X SEED Think (NAVER, 2025): Granite whose blocks may be normed after too."""

import math
from collections.abc import Mapping
from typing import Any

from modeling.families.family import Family, Key
from modeling.families.granite import FAMILY as GRANITE
from modeling.families.shared import EQUAL_BIASES, HEAD_KEYS
from modeling.families.values import checked


def reciprocal(number: float) -> float:
    """1 / ``number``, or a neighbour of it of which ``number`` is the reciprocal; of several, the shortest decimal.

    So the reciprocal of a reciprocal is the number itself where that has few digits.
    """
    nearest = 1 / number
    near = (nearest, math.nextafter(nearest, 0.0), math.nextafter(nearest, math.inf))
    return min((each for each in near if 1 / each == number), key=lambda each: len(repr(each)), default=nearest)


def divisor_of(factor: Any) -> Mapping[str, Any]:
    """The field for a factor of the logits. ValueError where no number divides by it."""
    factor = checked(factor, float)
    if not 0 < factor < math.inf:
        raise ValueError("it must be above 0")
    return {"logit_divisor": reciprocal(factor)}


def placement_of(has_norms_after: Any) -> Mapping[str, Any]:
    """The field for whether blocks are normed after too. ValueError where it is neither true nor false."""
    return {"norm_placement": "both" if checked(has_norms_after, bool) else "pre"}


FAMILY = Family(
    architecture="HyperCLOVAXForCausalLM",
    since=5,
    weights={
        **GRANITE.weights,
        "layers.{layer}.attention_post_norm.weight": "model.layers.{layer}.post_norm1.weight",
        "layers.{layer}.feed_forward_post_norm.weight": "model.layers.{layer}.post_norm2.weight",
    },
    keys={
        **GRANITE.keys,
        **HEAD_KEYS,
        # Granite's class divides by it.
        "logits_scaling": Key(
            ours=("logit_divisor",),
            write=lambda config: reciprocal(config.logit_divisor),
            read=divisor_of,
        ),
        "use_post_norm": Key(
            ours=("norm_placement",),
            write=lambda config: config.norm_placement == "both",
            read=placement_of,
        ),
    },
    constants=GRANITE.constants,
    ignored={},
    # null: the inverse root of head_dim
    defaults={**GRANITE.defaults, "attention_multiplier": None, "use_post_norm": True},
    heads_divide_d_model=True,
    equal=EQUAL_BIASES,
    # models/hyperclovax: a norm before each block always; only causal masks.
    allowed={"norm_placement": ("pre", "both")},
    published={},
)
