"""Rewrites the config.json of a model with images, or of one under another name, as that of its text model's class."""

from collections.abc import Iterator, Mapping
from typing import Any

from modeling.config import FAMILIES
from modeling.families import base_keys
from modeling.families.config_json import EVERYWHERE, QUANTIZED, REMEDY, InexpressibleConfig, alias_problems
from modeling.families.family import Family, OtherName, family_of
from modeling.families.values import shown

# Keys of a model with images that do not change what its text model computes.
AROUND = frozenset(
    {
        *("text_config", "vision_config", "language_model_only", "image_token_id", "video_token_id"),
        *("vision_start_token_id", "vision_end_token_id"),
    }
)
# Keys beside text_config that are meant for it too, where it does not have them itself.
OUTER = (
    *QUANTIZED,
    *("auto_map", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    *base_keys.DEFAULTS,
    *base_keys.GENERATION,
)


def text_model(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """``content`` with the model_type of a supported family, unchanged where it has one already or is unknown.

    A model_type may be another name of a family's class (``Family.model_types``), or that of a model with images, of
    which only text_config is read (``Family.within``). Raises InexpressibleConfig, with one line for each key, where
    such a model has no usable text_config, or has an unknown key beside it, or where a model under another name is
    beyond the class.
    """
    name = content.get("model_type")
    if name in FAMILIES or not isinstance(name, str):
        return content
    for ours in FAMILIES:
        family = family_of(ours)
        if name in family.model_types:
            return renamed(content, ours, family.model_types[name])
        if name == family.within:
            return part_about_text(content, ours)
    return content


def renamed(content: Mapping[str, Any], ours: str, other: OtherName) -> Mapping[str, Any]:
    """``content``, which is under another name of the class, in the keys of the class."""
    told = {other.aliases.get(key, key): value for key, value in content.items() if key not in other.constants}
    told = {**other.defaults, **told, "model_type": ours}
    problems = [*alias_problems(other.aliases, content), *renaming_problems(content, told, other)]
    if problems:
        raise InexpressibleConfig(problems)
    if told.get("architectures") == [other.architecture]:
        told["architectures"] = [family_of(ours).architecture]
    return told


def renaming_problems(content: Mapping[str, Any], told: Mapping[str, Any], other: OtherName) -> Iterator[str]:
    """One line for each key of ``content`` that the class, in whose keys ``told`` is, cannot compute."""
    named = f"is not possible with model_type={content['model_type']}"
    for key, constant in other.constants.items():
        if content.get(key, constant) != constant:
            rule = f"{named}, whose class knows {key}={shown(constant)} alone"
            yield f"config.json: {key}={shown(content[key])} {rule}; {REMEDY}"
    names = {key: alias for alias, key in other.aliases.items() if alias in content}
    for key, copied in other.same.items():
        if told[key] != told[copied]:
            beside = f"{names.get(copied, copied)}={shown(told[copied])}"
            rule = f"{named} and {beside}, since its class has one value for both"
            yield f"config.json: {names.get(key, key)}={shown(told[key])} {rule}; {REMEDY}"


def part_about_text(content: Mapping[str, Any], ours: str) -> Mapping[str, Any]:
    """The text_config of a model with images, completed by the keys beside it that hold for the text model too."""
    problems = [*around_problems(content, ours)]
    if problems:
        raise InexpressibleConfig(problems)
    return {**{key: content[key] for key in OUTER if key in content}, **content["text_config"]}


def around_problems(content: Mapping[str, Any], ours: str) -> Iterator[str]:
    """One line for each key of a model with images that cannot be used."""
    told, text = f"with model_type={content['model_type']}", content.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != ours:
        rule = f"is not possible {told}: it must be a table with model_type={ours}"
        yield f"config.json: text_config={shown(text)} {rule}; {REMEDY}"
    for key, constant in family_of(ours).text_constants.items():
        if isinstance(text, dict) and text.get(key, constant) != constant:
            rule = f"is not possible {told}, whose class knows {key}={shown(constant)} alone"
            yield f"config.json: text_config.{key}={shown(text[key])} {rule}; {REMEDY}"
    for key in sorted(content.keys() - {*EVERYWHERE, *AROUND, *OUTER, *family_of(ours).around}):
        name = key if key.isprintable() else shown(key)
        rule = "remove it if it changes nothing of what the model computes"
        yield f"config.json: {name}={shown(content[key])} is not known {told}; {rule}"


def without_images(family: Family, name: str) -> str:
    """The name that the tensor ``name`` of a model with images has in files of the text model alone."""
    prefix = prefix_of(family, name)
    return name if prefix is None else f"{family.prefixes_of_text[prefix]}{name.removeprefix(prefix)}"


def is_text(family: Family, name: str) -> bool:
    """Whether ``name`` is that of a text model's tensor in files of a model with images."""
    return prefix_of(family, name) is not None


def prefix_of(family: Family, name: str) -> str | None:
    """The prefix by which files of a model with images mark the text model's tensor ``name``; None if it has none."""
    prefixes = family.prefixes_of_text if family.within else {}
    return next((prefix for prefix in prefixes if name.startswith(prefix)), None)
