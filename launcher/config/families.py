"""The check of a model against what its family's `transformers` class can express (modeling/families).

A model that an export could not turn into its family's class is refused before it is trained.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from launcher.config.ranges import ranges
from launcher.config.words import join_or, show
from modeling.config import FAMILIES, NO_FAMILY, ModelConfig
from modeling.expert_layers import from_first_listed
from modeling.families.family import default_of, family_of, field_defaults, section_types
from modeling.init_config import MupInit


def check_family(model: ModelConfig) -> Iterator[str]:
    """One line for each thing in ``model`` that its family's `transformers` class cannot express."""
    if model.family == NO_FAMILY:
        yield from check_unused(model)
        return
    family = family_of(model.family)
    told = f"with model.family={model.family}, whose `transformers` class"
    for section, kind in section_types().items():
        value, noun = getattr(model, section), getattr(kind, "noun", section)
        first = fields(kind)[0]
        if family.has(section) == (value is not None) or (value is None and section in family.may_lack):
            continue
        others = [name for name in FAMILIES if family_of(name).has(section) != family.has(section)]
        families = f"model.family={join_or(others)}"
        if value is None:
            example = f"model.{section}.{first.name}={_plain(default_of(first))}"
            yield f"model.{section}=null is not possible {told} has {noun}; try {example}, or {families}"
        else:
            yield (
                f"model.{section}.{first.name}={_plain(getattr(value, first.name))} is not possible {told} has no "
                f"{noun}; try model.{section}=null, or {families}"
            )
    for key, allowed in family.expressible.items():
        for value in _values(model, key):
            if value not in allowed:
                tries = join_or([_plain(each) for each in allowed])
                yield f"model.{key}={_plain(value)} is not possible {told} cannot express it; try {tries}"
    for key, minimum in family.at_least.items():
        for value in _values(model, key):
            if value is not None and value < minimum:
                yield f"model.{key}={value} is not possible {told} needs at least {minimum}; try {minimum}"
    for key, value_for in family.derived.items():
        (value,), wanted = _values(model, key), value_for(model)
        if value != wanted:
            yield f"model.{key}={_plain(value)} is not possible {told} derives it from other keys; try {_plain(wanted)}"
    if isinstance(model.init, MupInit):
        base = replace(model, d_model=model.init.base_d_model)
        for key, value_for in family.derived.items():
            if value_for(base) != value_for(model):
                yield (
                    f"model.init.name=mup is not possible {told} derives model.{key} from model.d_model (muP needs a "
                    f"number that stays as the width grows); try model.init.name=depth_scaled"
                )
    for key in family.needs:
        if None in _values(model, key):
            usual = usual_number(key)
            yield f"model.{key}=null is not possible {told} needs a number; try {_plain(usual)}"
    if family.scales_queries and model.rope_scaling is None:
        yield (
            f"model.rope_scaling=null is not possible {told} scales queries by its original_seq_len; "
            "try model.rope_scaling={name: yarn}"
        )
    for key in family.whole:
        for value in _values(model, key):
            if value is not None and value % 1:
                near = float(math.ceil(value))
                yield f"model.{key}={value} is not possible {told} needs a whole number; try {near}"
    for key in family.even:
        for value in _values(model, key):
            if value is not None and value % 2:
                yield f"model.{key}={value} is not possible {told} needs an even number; try {value + 1}"
    if family.dense_layers_are_last and model.moe is not None:
        listed, behind = model.moe.dense_layers, from_first_listed(model.moe, model.n_layers)
        if listed != behind:
            yield (
                f"model.moe.dense_layers={_plain(list(listed))} is not possible {told} knows one last layer with "
                f"experts; try {_plain(list(behind))}"
            )
    for first, second in family.equal:
        values = [value for key in (first, second) for value in _values(model, key)]
        if len(set(values)) > 1:
            yield (
                f"model.{second}={_plain(values[1])} must be model.{first}={_plain(values[0])} {told} has one key for "
                f"both; try {_plain(values[0])}"
            )
    if family.heads_divide_d_model and model.d_head is not None and model.d_model % max(1, model.n_heads):
        near = -(-model.d_model // model.n_heads) * model.n_heads
        yield (
            f"model.d_model={model.d_model} must be a multiple of model.n_heads={model.n_heads} {told} demands it "
            f"even where model.d_head={model.d_head} is given; try {near}"
        )
    yield from check_idle(model, family.told - {*family.needs})


def check_unused(model: ModelConfig) -> Iterator[str]:
    """One line for each field that is missing or changes nothing in a model without a family."""
    if model.positions == "learned" and model.max_positions is None:
        usual = ranges(ModelConfig)["max_positions"].usual
        yield f"model.max_positions=null is not possible where model.positions=learned (it needs rows); try {usual}"
    yield from check_idle(model, frozenset(field_defaults()))


def check_idle(model: ModelConfig, choices: frozenset[str]) -> Iterator[str]:
    """One line for each of the dotted keys ``choices`` that is not its default, though other fields make it unused."""
    defaults = field_defaults()
    for is_so, why, keys in unused_where(model):
        for key in keys if is_so else ():
            for value in _values(model, key) if key in choices else ():
                if value != defaults[key]:
                    usual = _plain(defaults[key])
                    yield f"model.{key}={_plain(value)} changes nothing where {why}; try model.{key}={usual}"


def unused_where(model: ModelConfig) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    """(whether a condition holds for ``model``, the condition in words, the dotted keys that are unused then)."""
    latent = ("d_head", "qk_norm", "qkv_bias", "rope_fraction", "score_channels", "score_scale")
    has_dense = model.n_moe_layers < model.n_layers
    has_gates = has_dense or (model.moe is not None and model.moe.shared_width > 0)
    moe = model.moe
    yield from (
        (model.mla is not None, "model.mla is given", latent),
        (model.positions != "learned", f"model.positions={model.positions}", ("max_positions",)),
        (model.positions != "t5", f"model.positions={model.positions}", ("t5_buckets", "t5_max_distance")),
        (not model.qk_norm, "model.qk_norm=false", ("qk_norm_over", "qk_norm_after_rope")),
        (model.positions != "rope", f"model.positions={model.positions}", ("qk_norm_after_rope",)),
        (model.sliding_window is None, "model.sliding_window=null", ("local_rope_theta",)),
        (model.score_scale is not None, "model.score_scale is given", ("score_channels",)),
        (not has_dense, "no layer is dense", ("ff_bias", "ff_gated")),
        (not has_gates, "no layer is dense and no expert shared", ("activation",)),
        (moe is not None and moe.shared_width == 0, "no expert is shared", ("moe.shared_d_ff", "moe.shared_gate")),
        (moe is not None and moe.n_groups == 1, "model.moe.n_groups=1", ("moe.group_score",)),
    )


def usual_number(key: str) -> Any:
    """The value that a remedy suggests for the number at a dotted key below the model."""
    section, _, name = key.rpartition(".")
    return ranges(section_types()[section] if section else ModelConfig)[name].usual


def _values(model: ModelConfig, key: str) -> Iterator[Any]:
    """The value at a dotted key below the model, or nothing where its section is not there, or has no such key."""
    section, _, name = key.rpartition(".")
    value: Any = model
    for part in section.split(".") if section else ():
        value = getattr(value, part, None)
    if hasattr(value, name):
        yield getattr(value, name)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
