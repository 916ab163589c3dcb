"""The description of a model family (one `transformers` architecture) in one object, and how to find it by name."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from typing import Any, get_args, get_type_hints

from modeling.config import DROPOUTS, ModelConfig
from modeling.families.packed import Packed
from modeling.moe_config import MoEConfig
from modeling.rope_scaling import YarnScaling

ROUTER_BIAS = "layers.{layer}.feed_forward.router.bias"  # Roundtable's name of the selection bias
# Fields below `model` that no transformers class needs to know. Where a class has keys for dropout, these are read.
TRAINING_ONLY = ("init", "z_loss", "moe.balance", "moe.z_loss", "mtp.coefficient", *DROPOUTS)


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key of config.json that does not simply rename one field of Roundtable's config."""

    ours: tuple[str, ...]  # the fields below `model` that it sets, dotted
    write: Callable[[ModelConfig], Any]  # a model -> the key's value
    read: Callable[[Any], Mapping[str, Any]]  # the key's value -> fields; ValueError says why it is not possible


@dataclass(frozen=True, kw_only=True)
class OtherName:
    """Another model_type of a class's files. Their config.json is read as the class's own, but for what stands here."""

    architecture: str = ""  # the class that such files name instead
    defaults: Mapping[str, Any] = field(default_factory=dict)  # key -> its value where it is left out
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of keys -> keys
    # more keys, of which transformers' class computes this one value alone
    constants: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)  # key -> the key whose value it must repeat


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `transformers` architecture. Each module of this package has one as ``FAMILY``.

    "Our" names and fields are Roundtable's; names "in the files" are those of transformers' weights. ``keys``,
    ``constants`` and the tables after them describe config.json; `modeling.families.config_json` applies them in both
    directions. Rotary positions and what every config.json has (dtype, special tokens, maximum length) are not in them.
    """

    architecture: str  # the class in transformers
    # what else files call it: transformers has no class of that name, or takes this one for it
    model_types: Mapping[str, OtherName] = field(default_factory=dict)
    within: str = ""  # model_type of a model with images whose text_config is this class's
    # beginnings of the names of its text model's tensors in such a model's files -> those in files of this class
    prefixes_of_text: Mapping[str, str] = field(default_factory=lambda: {"model.language_model.": "model."})
    text_constants: Mapping[str, Any] = field(default_factory=dict)  # keys of it that must have this one value
    around: frozenset[str] = frozenset()  # more keys beside such a text_config that say nothing of the text model
    # other rows for ``weights``, of files that hold all experts of a layer in one tensor
    stacked: Mapping[str, str | Packed] = field(default_factory=dict)
    since: int = 4  # the first of transformers' versions 4 and 5 that has it
    weights: Mapping[str, str | Packed]  # our name of a weight -> its name in the files, with {layer} and {expert}
    keys: Mapping[str, str | Key]  # key of config.json -> our field below `model`, dotted
    constants: Mapping[str, Any]  # keys that must have this one value, since our models cannot express another
    ignored: Mapping[str, Any]  # keys that do not change what the model computes -> the value to write
    same: Mapping[str, str] = field(default_factory=dict)  # key -> the key whose value it must repeat
    passed_over: frozenset[str] = frozenset()  # more keys that do not change the model, and are not written
    # keys of published files that the class does not read -> the only value that is true of it; not written
    beside: Mapping[str, Any] = field(default_factory=dict)
    rope_passed_over: frozenset[str] = frozenset()  # such keys within rope_parameters
    defaults: Mapping[str, Any]  # the class's value of a key that is left out, where that is not the constant
    needs_bos: bool = False  # the class refuses a bos_token_id of null; that of EOS is written where there is no BOS
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names that the class reads -> keys
    allowed: Mapping[str, tuple[Any, ...]]  # our field -> the values that the class can express
    at_least: Mapping[str, int] = field(default_factory=dict)  # our field -> the smallest number that works
    needs: tuple[str, ...] = ()  # our fields that cannot be null
    may_lack: tuple[str, ...] = ()  # our optional sections that the class has, but not each model of it
    # names in the files, with {layer} for a layer of multi-token prediction -> our weight of which they hold a copy
    copies: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()  # our fields whose numbers have no fraction in config.json
    even: tuple[str, ...] = ()  # our fields whose numbers must be even
    dense_layers_are_last: bool = False  # no layer after the first of moe.dense_layers may have experts
    in_fp32: tuple[str, ...] = ("e_score_correction_bias",)  # ends of names in the files that are fp32 in every dtype
    unread: str = ""  # a pattern of names in the files: tensors that the class ignores
    heads_divide_d_model: bool = False  # n_heads must divide d_model even where d_head is given
    equal: tuple[tuple[str, str], ...] = ()  # pairs of our fields that are set by one key, and so must be equal
    turns_a_part: bool = False  # the class reads partial_rotary_factor
    has_local_rope: bool = False  # layers with a window have their own base of the rotary frequencies
    local_rope_key: str = ""  # the key of config.json with that base, written beside the table for both kinds of layers
    # our field -> the only value that the class can express, where that follows from other fields
    derived: Mapping[str, Callable[[ModelConfig], Any]] = field(default_factory=dict)
    prefix: str = ""  # of all names in the files but the head's; files saved from the class without a head lack it
    length_key: str = "max_position_embeddings"  # the key of config.json with the longest sequence
    tells_plain_rope: bool = False  # rope_scaling is written even if plain: left out, the class would scale frequencies
    # the kinds of scaled frequencies that the class computes, in both versions
    rope_scalings: tuple[str, ...] = ("linear", "llama3", "yarn", "dynamic")
    rope_aliases: Mapping[str, str] = field(default_factory=dict)  # the class's other names of these kinds
    # the class multiplies queries by a factor that grows with their positions (yarn's query_growth), and so needs yarn
    scales_queries: bool = False
    has_rope_alpha: bool = False  # `alpha` makes a "dynamic" scaling one of the base alone, by a fixed factor
    # fills in keys of a config.json that is read, whose values follow from other keys, as the class does it
    completed: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    published: Mapping[str, ModelConfig]  # the configs of well-known models, by name

    @property
    def has_selection_bias(self) -> bool:
        """Whether the class's router adds a bias to the scores by which it chooses experts."""
        return ROUTER_BIAS in self.weights

    @property
    def turns(self) -> bool:
        """Whether the class has rotary positions."""
        return "rope" in self.allowed.get("positions", ("rope",))

    @cached_property
    def told(self) -> frozenset[str]:
        """Our fields whose values are in config.json, dotted."""
        told = {name for key in self.keys.values() for name in ((key,) if isinstance(key, str) else key.ours)}
        rope = {
            "rope_theta": self.turns,
            "local_rope_theta": self.has_local_rope,
            "rope_fraction": self.turns_a_part,
            "rope_scaling": self.turns and bool(self.rope_scalings),
        }
        return frozenset(told | {"family", *self.derived} | {name for name, is_told in rope.items() if is_told})

    @cached_property
    def _sections(self) -> frozenset[str]:
        """The sections below `model` that have a field in config.json, such as "moe"."""
        return frozenset(section for section, dot, _ in (name.partition(".") for name in self.told) if dot)

    def has(self, section: str) -> bool:
        """Whether the class has the part of a model that an optional section of the config describes, such as "moe"."""
        return section in self._sections

    @cached_property
    def expressible(self) -> Mapping[str, tuple[Any, ...]]:
        """Our field -> the values that the class can express. A field that is left out is free.

        A field that is neither in config.json nor in ``allowed`` must have its default. So a feature that was added for
        another family is refused here without being named.
        """
        silent = {
            name: (default,)
            for name, default in field_defaults().items()
            if name not in self.told and not name.startswith(TRAINING_ONLY)
        }
        sections = {name for name in section_types() if self.has(name)}
        allowed = {
            name: values
            for name, values in {**silent, **self.allowed}.items()
            if "." not in name or name.partition(".")[0] in {*sections, "rope_scaling"}
        }
        if "rope_scaling" not in self.told:
            return allowed
        growth = {} if self.scales_queries else {"rope_scaling.query_growth": (YarnScaling.query_growth,)}
        return {**allowed, **growth, "rope_scaling.name": self.rope_scalings}


def family_of(name: str) -> Family:
    """The family with that name, one of ``modeling.config.FAMILIES``: ``FAMILY`` of its module in this package."""
    family = importlib.import_module(f"modeling.families.{name}").FAMILY
    assert isinstance(family, Family), name
    return family


@cache
def section_types() -> dict[str, type]:
    """The optional sections of ModelConfig, such as "moe", and their dataclasses.

    Sections that are one of several kinds, such as rope_scaling, are not among them.
    """
    found = {
        name: [each for each in get_args(hint) if is_dataclass(each)]
        for name, hint in get_type_hints(ModelConfig).items()
    }
    return {name: kinds[0] for name, kinds in found.items() if len(kinds) == 1 and isinstance(kinds[0], type)}


@cache
def field_defaults() -> dict[str, Any]:
    """The default of each field below `model`, by its dotted name.

    Optional sections are listed by their fields only.
    """
    sections = section_types()
    found = {each.name: default_of(each) for each in fields(ModelConfig) if each.name not in sections}
    for section, kind in sections.items():
        found |= {f"{section}.{each.name}": default_of(each) for each in fields(kind)}
    return found


def default_of(each: Field[Any]) -> Any:
    """The default of one field of a dataclass."""
    return each.default if each.default_factory is MISSING else each.default_factory()


def moe_of(config: ModelConfig) -> MoEConfig:
    """The experts' configuration, in a family that always has experts."""
    assert config.moe is not None, f"model.family={config.family} needs model.moe"
    return config.moe
