"""What a model family is: everything that is said of it, in one object, and how it is found by name."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from typing import Any, get_args, get_type_hints

from modeling.config import DROPOUTS, ModelConfig
from modeling.families.packed import Packed
from modeling.moe_config import MoEConfig

ROUTER_BIAS = "layers.{layer}.feed_forward.router.bias"  # our name of the selection bias
# Fields below `model` that no transformers class needs to know. Some have keys for dropout, which then tell it.
TRAINING_ONLY = ("init", "z_loss", "moe.balance", "moe.z_loss", "mtp.coefficient", *DROPOUTS)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of config.json that is more than a field of ours by another name."""

    ours: tuple[str, ...]  # the fields below `model` that it tells, dotted
    write: Callable[[ModelConfig], Any]  # its value for a model
    read: Callable[[Any], Mapping[str, Any]]  # the fields that its value means; ValueError says why there are none


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `transformers` architecture. Its module in this package has it as ``FAMILY``.

    config.json is told by four tables, which `modeling.families.config_json` applies in both directions. Rotary
    positions and what every config.json has (dtype, special tokens, maximum length) are not in them.
    """

    architecture: str  # the class in transformers
    since: int = 4  # the first of transformers' versions 4 and 5 that has it
    weights: Mapping[str, str | Packed]  # our name of a weight -> its name in the files, with {layer} and {expert}
    keys: Mapping[str, str | Key]  # key of config.json -> our field below `model`, dotted
    constants: Mapping[str, Any]  # keys of which our models know one value alone
    ignored: Mapping[str, Any]  # keys that change nothing of what the model computes, with the value that we write
    same: Mapping[str, str] = field(default_factory=dict)  # key -> the one that it is to copy
    passed_over: frozenset[str] = frozenset()  # more such keys, which we do not write
    rope_passed_over: frozenset[str] = frozenset()  # such keys of rope_parameters
    defaults: Mapping[str, Any]  # what the class takes for a key that is left out, where that is not the constant
    aliases: Mapping[str, str] = field(default_factory=dict)  # other names of keys, which the class reads as well
    allowed: Mapping[str, tuple[Any, ...]]  # our field -> the values that the class can express
    at_least: Mapping[str, int] = field(default_factory=dict)  # our field -> the smallest number that works
    needs: tuple[str, ...] = ()  # our fields that cannot be null
    may_lack: tuple[str, ...] = ()  # our optional sections that the class has, and a model of it may do without
    # names in the files, with {layer} of a module that predicts further tokens -> our weight that they hold once more
    copies: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()  # our fields whose numbers have no fraction in config.json
    even: tuple[str, ...] = ()  # our fields whose numbers must be even
    dense_layers_are_last: bool = False  # moe.dense_layers are those behind some layer, as far as they had experts
    in_fp32: tuple[str, ...] = ("e_score_correction_bias",)  # how names in the files end that are fp32 in every dtype
    unread: str = ""  # a pattern of names in the files: tensors that the class passes over
    heads_divide_d_model: bool = False  # also where d_head is given
    equal: tuple[tuple[str, str], ...] = ()  # pairs of our fields that one key tells
    turns_a_part: bool = False  # the class reads partial_rotary_factor
    has_local_rope: bool = False  # layers with a window have a base of their frequencies of their own
    local_rope_key: str = ""  # key of config.json: that base, beside the tables of both
    # our field -> the only value that the class can express, where that follows from other fields
    derived: Mapping[str, Callable[[ModelConfig], Any]] = field(default_factory=dict)
    prefix: str = ""  # of the names in the files, but for the head's; files of the class without a head lack it
    length_key: str = "max_position_embeddings"  # key of config.json: the longest sequence
    tells_plain_rope: bool = False  # for the class scales them where rope_scaling is left out
    # the kinds of scaled frequencies that the class computes, in both versions
    rope_scalings: tuple[str, ...] = ("linear", "llama3", "yarn", "dynamic")
    rope_aliases: Mapping[str, str] = field(default_factory=dict)  # what else it calls them
    # a config.json with keys filled in whose values follow from others, as the class does it
    completed: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    published: Mapping[str, ModelConfig]  # the sizes of well-known models

    @property
    def has_selection_bias(self) -> bool:
        """Whether the class's router adds a bias to the scores by which it chooses."""
        return ROUTER_BIAS in self.weights

    @property
    def turns(self) -> bool:
        """Whether the class knows positions by the rotary embedding."""
        return "rope" in self.allowed.get("positions", ("rope",))

    @cached_property
    def told(self) -> frozenset[str]:
        """Our fields that config.json tells, dotted."""
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
        """The sections below `model` of which config.json tells a field, such as "moe"."""
        return frozenset(section for section, dot, _ in (name.partition(".") for name in self.told) if dot)

    def has(self, section: str) -> bool:
        """Whether the class has the part of a model that an optional section of our config describes, such as "moe"."""
        return section in self._sections

    @cached_property
    def expressible(self) -> Mapping[str, tuple[Any, ...]]:
        """Our field -> the values that the class can express; a field that is left out is free.

        A field of which neither config.json nor ``allowed`` speaks stays as it is by default. So what another family
        brings along is refused here without being named.
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
        return {**allowed, "rope_scaling.name": self.rope_scalings} if "rope_scaling" in self.told else allowed


def family_of(name: str) -> Family:
    """The family of that name, one of ``modeling.config.FAMILIES``: ``FAMILY`` of its module in this package."""
    family = importlib.import_module(f"modeling.families.{name}").FAMILY
    assert isinstance(family, Family), name
    return family


@cache
def section_types() -> dict[str, type]:
    """The optional sections of ModelConfig, such as "moe", and their dataclasses. None is one of several kinds."""
    found = {
        name: [each for each in get_args(hint) if is_dataclass(each)]
        for name, hint in get_type_hints(ModelConfig).items()
    }
    return {name: kinds[0] for name, kinds in found.items() if len(kinds) == 1 and isinstance(kinds[0], type)}


@cache
def field_defaults() -> dict[str, Any]:
    """Our field below `model`, dotted -> its default. The optional sections are there as their fields alone."""
    sections = section_types()
    found = {each.name: default_of(each) for each in fields(ModelConfig) if each.name not in sections}
    for section, kind in sections.items():
        found |= {f"{section}.{each.name}": default_of(each) for each in fields(kind)}
    return found


def default_of(each: Field[Any]) -> Any:
    """The default of one field of a dataclass."""
    return each.default if each.default_factory is MISSING else each.default_factory()


def moe_of(config: ModelConfig) -> MoEConfig:
    """The experts' configuration, of a family that cannot be without."""
    assert config.moe is not None, f"model.family={config.family} needs model.moe"
    return config.moe
