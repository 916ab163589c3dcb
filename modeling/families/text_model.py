"""Rewrites the config.json of a model with images, or of one under another name, as that of its text model's class."""

from collections.abc import Iterator, Mapping
from typing import Any

from modeling.config import FAMILIES
from modeling.families import base_keys
from modeling.families.config_json import EVERYWHERE, QUANTIZED, REMEDY, InexpressibleConfig
from modeling.families.family import Family, family_of
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
    such a model has no usable text_config, or has an unknown key beside it.
    """
    name = content.get("model_type")
    if name in FAMILIES or not isinstance(name, str):
        return content
    for ours in FAMILIES:
        family = family_of(ours)
        if name in family.model_types:
            return {**content, "model_type": ours}
        if name == family.within:
            return part_about_text(content, ours)
    return content


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
