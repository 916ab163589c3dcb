"""Writing a config as YAML: the whole tree, for the run directory and for `roundtable config`."""

import dataclasses
import io
import json
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from launcher.config.schema import alternative_name, field_default
from launcher.config.tree import RunConfig
from launcher.config.words import show


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML, every key written out; loading it gives an equal config."""
    return _write(_section_to_yaml(config, config))


def describe_config(config: RunConfig) -> str:
    """The resolved config as YAML, each value that is not the default followed by ``# default: VALUE``."""
    return _write(_section_to_yaml(config, RunConfig()))


def config_to_json(config: RunConfig) -> str:
    """The resolved config as indented JSON, every key written out."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


class _Representer(RoundTripRepresenter):
    """Writes None as ``null`` rather than as nothing."""


_Representer.add_representer(
    type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null")
)


def _write(tree: CommentedMap) -> str:
    yaml = YAML()
    yaml.version = (1, 2)
    yaml.Representer = _Representer
    yaml.width = 10**6  # never fold a line
    yaml.indent(mapping=2, sequence=4, offset=2)
    text = io.StringIO()
    yaml.dump(tree, text)
    return text.getvalue().removeprefix("%YAML 1.2\n---\n")


def _section_to_yaml(section: Any, default: Any) -> CommentedMap:
    """A section with a comment at each value that is not ``default``'s.

    Where ``default`` is null or another alternative of a union, the section is compared with its own class's defaults.
    """
    tree = CommentedMap()
    for field in dataclasses.fields(section):
        value, expected = getattr(section, field.name), field_default(type(section), field.name)
        if type(default) is type(section):
            expected = getattr(default, field.name)
        tree[field.name] = _value_to_yaml(value, expected)
        same_section = dataclasses.is_dataclass(value) and dataclasses.is_dataclass(expected)
        if value != expected and not same_section and expected is not dataclasses.MISSING:
            tree.yaml_add_eol_comment(f"default: {show(expected)}", field.name, column=0)
        elif type(value) is not type(expected) and same_section:
            tree.yaml_add_eol_comment(f"default: {{name: {alternative_name(type(expected))}}}", field.name, column=0)
    return tree


def _value_to_yaml(value: Any, default: Any) -> Any:
    """A value as ruamel's containers; a list of sections shows each section's own differences."""
    if dataclasses.is_dataclass(value):
        return _section_to_yaml(value, default)
    if isinstance(value, str) and not value.isprintable():
        return DoubleQuotedScalarString(value)  # escaped: left to itself, ruamel writes U+0085 as a line break
    if not isinstance(value, tuple):
        return value
    defaults = default if value == default else (None,) * len(value)
    sequence = CommentedSeq(_value_to_yaml(item, expected) for item, expected in zip(value, defaults, strict=True))
    if not any(dataclasses.is_dataclass(item) for item in value):
        sequence.fa.set_flow_style()
    return sequence
