"""The check of a model against what its family's `transformers` class can express (modeling/families).

A model that an export could not turn into its family's class is refused before it is trained.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from launcher.config.ranges import ranges
from launcher.config.words import join_or, show
from modeling.config import FAMILIES, ModelConfig
from modeling.families.family import default_of, family_of, section_types


def check_family(model: ModelConfig) -> Iterator[str]:
    """One line for each thing in ``model`` that its family's `transformers` class cannot express."""
    family = family_of(model.family)
    told = f"with model.family={model.family}, whose `transformers` class"
    for section, kind in section_types().items():
        value, noun = getattr(model, section), getattr(kind, "noun", section)
        first = fields(kind)[0]
        others = [name for name in FAMILIES if family_of(name).has(section) != family.has(section)]
        families = f"model.family={join_or(others)}"
        if family.has(section) and value is None:
            example = f"model.{section}.{first.name}={_plain(default_of(first))}"
            yield f"model.{section}=null is not possible {told} has {noun}; try {example}, or {families}"
        if not family.has(section) and value is not None:
            yield (
                f"model.{section}.{first.name}={_plain(getattr(value, first.name))} is not possible {told} has no "
                f"{noun}; try model.{section}=null, or {families}"
            )
    for key, allowed in family.expressible().items():
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
    for key in family.needs:
        if None in _values(model, key):
            usual = ranges(ModelConfig)[key].usual
            yield f"model.{key}=null is not possible {told} needs a number; try {_plain(usual)}"
    for key in family.whole:
        for value in _values(model, key):
            if value is not None and value % 1:
                near = float(math.ceil(value))
                yield f"model.{key}={value} is not possible {told} needs a whole number; try {near}"
    for key in family.even:
        for value in _values(model, key):
            if value is not None and value % 2:
                yield f"model.{key}={value} is not possible {told} needs an even number; try {value + 1}"
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


def _values(model: ModelConfig, key: str) -> Iterator[Any]:
    """The value at a dotted key below the model, or nothing where the model lacks its section."""
    section, _, name = key.rpartition(".")
    value: Any = model
    for part in section.split(".") if section else ():
        value = getattr(value, part, None)
    if value is not None:
        yield getattr(value, name)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
