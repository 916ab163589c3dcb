"""config.json of anyone's model in the words of the class that computes it."""

from collections.abc import Iterator, Mapping
from typing import Any

from modeling.config import FAMILIES
from modeling.families.config_json import EVERYWHERE, QUANTIZED, REMEDY, InexpressibleConfig
from modeling.families.family import Family, family_of
from modeling.families.values import shown

# Keys of a model with images that say nothing of what its text model computes for a text.
AROUND = frozenset(
    {
        *("text_config", "vision_config", "language_model_only", "image_token_id", "video_token_id"),
        *("vision_start_token_id", "vision_end_token_id"),
    }
)
OUTER = (*QUANTIZED, "auto_map", "tie_word_embeddings")  # keys beside text_config that are meant for it too


def text_model(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with the model_type of our family; as it is where that is one of ours already, or unknown.

    So are read files whose model_type is another name of the family's class (``Family.model_types``), and of models
    with images the part about text (``Family.within``). Raises InexpressibleConfig, with one line for each key, where
    such a model has no such part, or a key that nobody knows.
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
    """The text_config of a model with images, and what stands beside it and is meant for it too."""
    problems = [*around_problems(content, ours)]
    if problems:
        raise InexpressibleConfig(problems)
    return {**{key: content[key] for key in OUTER if key in content}, **content["text_config"]}


def around_problems(content: Mapping[str, Any], ours: str) -> Iterator[str]:
    """One line for each key that cannot be used."""
    told, text = f"with model_type={content['model_type']}", content.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != ours:
        rule = f"is not possible {told}: it must be a table with model_type={ours}"
        yield f"config.json: text_config={shown(text)} {rule}; {REMEDY}"
    for key in sorted(content.keys() - {*EVERYWHERE, *AROUND, *OUTER}):
        name = key if key.isprintable() else shown(key)
        rule = "remove it if it changes nothing of what the model computes"
        yield f"config.json: {name}={shown(content[key])} is not known {told}; {rule}"


def without_images(family: Family, name: str) -> str:
    """The name of a tensor in files of the text model alone, of its ``name`` in those of the model with images."""
    return f"{family.prefix_of_text[1]}{name.removeprefix(family.prefix_of_text[0])}" if is_text(family, name) else name


def is_text(family: Family, name: str) -> bool:
    """Whether the tensor lies in files of a model with images, and is the text model's."""
    return family.within != "" and name.startswith(family.prefix_of_text[0])
