"""A model's config.json of Hugging Face transformers: written, so that versions 4 and 5 read it, and read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modeling.config import FAMILIES, ModelConfig
from modeling.expert_layers import told_once
from modeling.families import base_keys
from modeling.families.family import Family, Key, family_of, section_types
from modeling.families.rope_json import from_rope_json, longest, to_rope_json
from modeling.families.shared import is_count
from modeling.families.values import checked, hints_of, shown
from modeling.moe_config import BiasBalance, NoBalance

# Keys that any config.json may have besides its family's: they do not change what the model computes, or are read here.
EVERYWHERE = frozenset(
    {
        *("model_type", "architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"),
        *("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor", "max_position_embeddings"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "return_dict", "pretraining_tp"),
        *("output_attentions", "output_hidden_states", "chunk_size_feed_forward", "max_window_layers"),
        *(
            "_sliding_window_pattern",
            "_attn_implementation",
            "_attn_implementation_autoset",
            "cache_implementation",
            "is_encoder_decoder",
            "id2label",
            "label2id",
            "problem_type",
            "tokenizer_class",
        ),
        *base_keys.PASSED_OVER,
        *base_keys.GENERATION,
        "auto_map",  # code of the folder's own, which nobody runs: the class is transformers' own
        *("transformers.js_config", "unsloth_fixed", "unsloth_version"),  # of other programs
    }
)
REMEDY = "give another model"
QUANTIZED = ("quantization_config", "quantization")  # the second is MLX's
LISTS = ("layer_types", "no_rope_layers", "mlp_layer_types", "layer_rope_theta")  # keys with an entry for each layer


@dataclass(frozen=True, kw_only=True)
class SpecialTokens:
    """The ids of special tokens; None for one that does not exist."""

    bos: int | None = None
    eos: int | tuple[int, ...] | None = None  # several: each ends a text
    pad: int | None = None


class InexpressibleConfig(ValueError):
    """A config.json that Roundtable cannot express as a model. ``problems`` holds one message for each key."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def to_config_json(config: ModelConfig, seq_len: int, special: SpecialTokens, dtype: str) -> dict[str, Any]:
    """The content of config.json, which `AutoConfig` reads. ``dtype`` is torch's name of it, e.g. "bfloat16".

    transformers 4 silently ignores some keys that 5 reads, and takes its classes' defaults. So dtype and the rotary
    positions (``rope_json``) are written in both versions' forms.
    """
    family = family_of(config.family)
    return {
        "architectures": [family.architecture],
        "model_type": config.family,
        **{name: written(config, key) for name, key in family.keys.items()},
        **family.constants,
        **family.ignored,
        **to_rope_json(config, family),
        family.length_key: longest(config, seq_len),
        "dtype": dtype,
        "torch_dtype": dtype,
        "bos_token_id": first_token(special) if family.needs_bos else special.bos,
        "eos_token_id": special.eos,
        "pad_token_id": special.pad,
        "use_cache": True,
    }


def first_token(special: SpecialTokens) -> int:
    """The id that a text may begin with: BOS, or else the (first) EOS, which ends the text before it, or else 0."""
    if special.bos is not None:
        return special.bos
    eos = special.eos if isinstance(special.eos, tuple) else (special.eos,)
    return next((each for each in eos if each is not None), 0)


def written(config: ModelConfig, key: str | Key) -> Any:
    """The value to write for one key of config.json."""
    if isinstance(key, Key):
        return key.write(config)
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def from_config_json(content: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes. A key that is left out has its default in transformers' class.

    Of the fields that matter to training alone, dropout is read where the class has keys for it; there is no auxiliary
    loss, and a router with a selection bias is balanced by it. Raises InexpressibleConfig, with one message for each
    key that Roundtable cannot express.
    """
    name = content.get("model_type")
    if name not in FAMILIES:
        told = f"must be one of the {len(FAMILIES)} families that `roundtable config --keys model.family` lists"
        raise InexpressibleConfig([f"config.json: model_type={shown(name)} {told}; {REMEDY}"])
    family, told = family_of(name), f"with model.family={name}"
    problems = [*alias_problems(family.aliases, content)]
    content = {family.aliases.get(key, key): value for key, value in content.items()} | dict(content)
    if family.completed is not None:
        content = family.completed(content)
    problems += [*constant_problems(family, content), *unknown_problems(family, content)]
    values: dict[str, Any] = {key: only[0] for key, only in family.expressible.items() if len(only) == 1}
    values["family"] = name
    try:
        values |= from_rope_json(content, family)
    except ValueError as error:
        problems.append(f"config.json: {error}; {REMEDY}")
    for hf_key, key in family.keys.items():
        value = content.get(hf_key, family.defaults.get(hf_key))
        try:
            values |= read(value, key)
        except ValueError as error:
            problems.append(f"config.json: {hf_key}={shown(value)} is not possible {told}: {error}; {REMEDY}")
    problems += [*length_problems(family, content), *copy_problems(family, content)]
    if problems:
        raise InexpressibleConfig(problems)
    if family.has("moe"):
        values["moe.balance"] = BiasBalance() if family.has_selection_bias else NoBalance()
    model = built({"n_kv_heads": values["n_heads"], **values})
    if model.moe is not None:
        model = replace(model, moe=told_once(model.moe, model.n_layers))
    return replace(model, **{name: value(model) for name, value in family.derived.items()})


def constant_problems(family: Family, content: Mapping[str, Any]) -> Iterator[str]:
    """One message for each key with another value than the only one that Roundtable can express."""
    own = {*family.keys, *family.ignored, *family.passed_over}
    base = {key: value for key, value in base_keys.DEFAULTS.items() if key not in own}
    constants = {**base, **family.constants, **family.beside, "architectures": [family.architecture]}
    for key, constant in constants.items():
        value = content.get(key, family.defaults.get(key, constant))
        if value != constant and (key, value) != ("architectures", None):
            yield (
                f"config.json: {key}={shown(value)} is not possible with model.family={content['model_type']}, which "
                f"knows {key}={shown(constant)} alone; {REMEDY}"
            )


def alias_problems(aliases: Mapping[str, str], content: Mapping[str, Any]) -> Iterator[str]:
    """One message for each key that is given under two names with two values; version 5 would take the other name's."""
    for alias, key in aliases.items():
        if alias not in EVERYWHERE and {alias, key} <= content.keys() and content[alias] != content[key]:
            rule = f"must be {key}={shown(content[key])}, of which it is another name; remove one of them"
            yield f"config.json: {alias}={shown(content[alias])} {rule}"


def length_problems(family: Family, content: Mapping[str, Any]) -> Iterator[str]:
    """One message for each list with an entry for each layer whose length is not the number of layers."""
    for key in (key for key in LISTS if key in family.keys):
        listed = content.get(key)
        n_layers = content.get("num_hidden_layers", family.defaults["num_hidden_layers"])
        if type(listed) is list and is_count(n_layers) and len(listed) != n_layers:
            rule = f"is not possible with num_hidden_layers={shown(n_layers)}: it must have an entry for each layer"
            yield f"config.json: {key}={shown(listed)} {rule}; {REMEDY}"


def copy_problems(family: Family, content: Mapping[str, Any]) -> Iterator[str]:
    """One message for each key whose value differs from that of the key that it must repeat."""
    for key, copied in family.same.items():
        value, wanted = content.get(key), content.get(copied, family.defaults.get(copied))
        if value is not None and value != wanted:
            rule = f"is not possible with {copied}={shown(wanted)}, at which the class looks alone"
            yield f"config.json: {key}={shown(value)} {rule}; {REMEDY}"


def unknown_problems(family: Family, content: Mapping[str, Any]) -> Iterator[str]:
    """One message for each key of config.json whose meaning is not known."""
    local = {family.local_rope_key} if family.local_rope_key else set()
    known = {
        *EVERYWHERE,
        *base_keys.DEFAULTS,
        *local,
        family.length_key,
        *family.keys,
        *family.constants,
        *family.beside,
        *family.ignored,
        *family.passed_over,
        *family.aliases,
    }
    for key in sorted(content.keys() - known):
        if key in QUANTIZED and content[key] is None:  # as a model that was dequantized may say
            continue
        if key in QUANTIZED:
            yield (
                f"config.json: {key}={shown(content[key])} is not possible: quantized weights are not read; give a "
                "folder of plain ones, as transformers saves what it has dequantized"
            )
            continue
        yield (
            f"config.json: {key if key.isprintable() else shown(key)}={shown(content[key])} is not known with "
            f"model.family={content['model_type']}; remove it if it changes nothing of what the model computes"
        )


def read(value: Any, key: str | Key) -> dict[str, Any]:
    """Our fields that one key of config.json sets. ValueError where they cannot have its value."""
    fields = {key: value} if isinstance(key, str) else key.read(value)
    return {name: checked(field, hint_of(name)) for name, field in fields.items()}


def hint_of(name: str) -> Any:
    """The type of a dotted field below `model`."""
    section, _, leaf = name.rpartition(".")
    return hints_of(section_types()[section] if section else ModelConfig)[leaf]


def built(values: Mapping[str, Any]) -> ModelConfig:
    """The configuration with these dotted fields. A section of which no field is given is left out."""
    own: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for section, kind in section_types().items():
        inside = {name.partition(".")[2]: value for name, value in values.items() if name.startswith(f"{section}.")}
        own[section] = kind(**inside) if inside else None
    return ModelConfig(**own)


def generation_config(special: SpecialTokens) -> dict[str, Any]:
    """The content of generation_config.json: sampling from the model's own distribution, up to EOS.

    There is no max_length, since transformers warns if it meets max_new_tokens. Padding falls back to EOS, as
    transformers does itself with a warning. A top_k that is left out or null would mean 50, so it is 0.
    """
    eos = special.eos[0] if isinstance(special.eos, tuple) and special.eos else special.eos
    config = {
        "bos_token_id": special.bos,
        "do_sample": True,
        "eos_token_id": special.eos,
        "pad_token_id": eos if special.pad is None else special.pad,
        "top_k": 0,
    }
    return {key: value for key, value in config.items() if value is not None}
