"""A model's config.json of Hugging Face transformers, written (as 4 and 5 read it) and read."""

import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from modeling.config import FAMILIES, BiasBalance, ModelConfig, NoBalance
from modeling.families.family import Family, Key, family_of, section_types

# Keys that any config.json may have besides: they change nothing of what the model computes, or are read here.
EVERYWHERE = frozenset(
    {
        *("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"),
        *("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "max_position_embeddings"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "return_dict", "pretraining_tp"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "max_window_layers"),
        *("is_encoder_decoder", "id2label", "label2id", "problem_type"),
    }
)
REMEDY = "give another model"
MOST_SHOWN = 60  # characters of a value that a message shows


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The tokenizer's ids of its special tokens; None where it has none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


class InexpressibleConfig(ValueError):
    """A config.json that no model of ours is. ``problems`` holds one line for each key."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def to_config_json(config: ModelConfig, seq_len: int, special: SpecialTokens, dtype: str) -> dict[str, Any]:
    """config.json: what `AutoConfig` reads. ``dtype`` is torch's name of it, e.g. "bfloat16".

    transformers 5 looks for the rotary embedding's numbers in rope_parameters, and 4 beside the other keys: it passes
    over rope_parameters and takes its classes' defaults, in silence. Both forms are written, of dtype too.
    """
    family = family_of(config.family)
    rope: dict[str, Any] = {"rope_theta": config.rope_theta}
    if "partial_rotary_factor" in family.defaults:  # the class would turn a part of the channels
        rope["partial_rotary_factor"] = 1.0
    return {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{name: written(config, key) for name, key in family.keys.items()},
        **family.constants,
        **family.ignored,
        **rope,
        "rope_parameters": {"rope_type": "default", **rope},
        "max_position_embeddings": seq_len,
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": special.bos,
        "eos_token_id": special.eos,
        "pad_token_id": special.pad,
        "use_cache": True,
    }


def written(config: ModelConfig, key: str | Key) -> Any:
    """The value of one key of config.json."""
    if isinstance(key, Key):
        return key.write(config)
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def from_config_json(content: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes; a key that is left out means what it means in transformers' class.

    What shapes training alone is no part of it: there is no auxiliary loss, and a router that has a selection bias
    moves it. Raises InexpressibleConfig, with one line for each key that no model of ours can express.
    """
    name = content.get("model_type")
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InexpressibleConfig([f"config.json: model_type={shown(name)} must be one of {known}; {REMEDY}"])
    family, told = family_of(name), f"with model.family={name}"
    content = {family.aliases.get(key, key): value for key, value in content.items()} | dict(content)
    problems = [*constant_problems(family, content), *unknown_problems(family, content)]
    values: dict[str, Any] = {key: only[0] for key, only in family.expressible().items() if len(only) == 1}
    values["family"] = name
    try:
        values["rope_theta"] = rope_theta(family, content)
    except ValueError as error:
        problems.append(f"config.json: {error}; {REMEDY}")
    for hf_key, key in family.keys.items():
        value = content.get(hf_key, family.defaults.get(hf_key))
        try:
            values |= read(value, key)
        except ValueError as error:
            problems.append(f"config.json: {hf_key}={shown(value)} is not possible {told}: {error}; {REMEDY}")
    if problems:
        raise InexpressibleConfig(problems)
    if family.has("moe"):
        values["moe.balance"] = BiasBalance() if family.has_selection_bias else NoBalance()
    return built({"n_kv_heads": values["n_heads"], **values})


def constant_problems(family: Family, content: Mapping[str, Any]) -> Iterator[str]:
    """One line for each key of which our models know another value alone."""
    constants = {**family.constants, "architectures": [family.architecture]}
    for key, constant in constants.items():
        value = content.get(key, family.defaults.get(key, constant))
        if value != constant and (key, value) != ("architectures", None):
            yield (
                f"config.json: {key}={shown(value)} is not possible with model.family={content['model_type']}, which "
                f"knows {key}={shown(constant)} alone; {REMEDY}"
            )


def unknown_problems(family: Family, content: Mapping[str, Any]) -> Iterator[str]:
    """One line for each key that nothing is known of."""
    known = {*EVERYWHERE, *family.keys, *family.constants, *family.ignored, *family.aliases}
    for key in sorted(content.keys() - known):
        yield (
            f"config.json: {key if key.isprintable() else shown(key)}={shown(content[key])} is not known with "
            f"model.family={content['model_type']}; remove it if it changes nothing of what the model computes"
        )


def rope_theta(family: Family, content: Mapping[str, Any]) -> float:
    """The base of the rotary frequencies. ValueError where they are scaled, or turn a part of the channels.

    transformers 4 has it beside the other keys, and 5 in rope_parameters, which counts where there are both.
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    given = content.get(key) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{key}={shown(given)} must be a table")
    default_part = content.get("partial_rotary_factor", family.defaults.get("partial_rotary_factor", 1.0))
    part = given.get("partial_rotary_factor", default_part)
    if part != 1:
        raise ValueError(f"partial_rotary_factor={shown(part)} is not possible, all channels turn")
    kind = given.get("rope_type", given.get("type", "default"))
    extra = given.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if kind != "default" or extra:
        raise ValueError(f"{key}={shown(given)} is not possible, frequencies are not scaled")
    theta = given.get("rope_theta", content.get("rope_theta", family.defaults["rope_theta"]))
    try:
        return checked(theta, float)
    except ValueError as error:
        raise ValueError(f"rope_theta={shown(theta)} is not possible: {error}") from None


def read(value: Any, key: str | Key) -> dict[str, Any]:
    """Our fields that one key of config.json tells. ValueError where its value is none of theirs."""
    fields = {key: value} if isinstance(key, str) else key.read(value)
    return {name: checked(field, hint_of(name)) for name, field in fields.items()}


def hint_of(name: str) -> Any:
    """The type of a dotted field below `model`."""
    section, _, leaf = name.rpartition(".")
    return get_type_hints(section_types()[section] if section else ModelConfig)[leaf]


def checked(value: Any, hint: Any) -> Any:
    """``value`` if it is of the type, an integer made a float where one is wanted. ValueError otherwise."""
    members = get_args(hint) or (hint,)
    if type(value) is int and int not in members and float in members:
        return float(value)
    if type(value) not in members:
        names = " or ".join("null" if member is types.NoneType else member.__name__ for member in members)
        raise ValueError(f"it must be {names}")
    return value


def built(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration with these dotted fields; a section that no field is in is left out."""
    own: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for section, kind in section_types().items():
        inside = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")}
        own[section] = kind(**inside) if inside else None
    return ModelConfig(**own)


def shown(value: Any) -> str:
    """``value`` as JSON, on one line, cut where it is long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def generation_config(special: SpecialTokens) -> dict[str, Any]:
    """generation_config.json: sampling from the model's own distribution, up to EOS.

    There is no max_length: transformers warns when it meets max_new_tokens. Padding falls back on EOS, as it would
    anyway, with a warning. A top_k left out, or null, would be 50.
    """
    config = {
        "bos_token_id": special.bos,
        "do_sample": True,
        "eos_token_id": special.eos,
        "pad_token_id": special.eos if special.pad is None else special.pad,
        "top_k": 0,
    }
    return {key: value for key, value in config.items() if value is not None}
