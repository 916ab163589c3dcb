"""The JSON schema of the config: refuses what the config's own check of types, names and ranges refuses, and no more."""

import copy
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import extend

from launcher.cli import main
from launcher.config.json_schema import config_schema, schema_text
from launcher.config.ranges import Range, range_problems, ranges
from launcher.config.schema import (
    alternative_name,
    alternatives,
    field_default,
    field_hints,
    is_nullable,
    item_hint,
    literal_values,
    members,
)
from launcher.config.tree import RunConfig
from launcher.config.validate import build_config
from launcher.config.yaml_text import read_yaml_file

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = [*sorted(CONFIGS.glob("*.yaml")), *sorted((CONFIGS / "models").glob("*.yaml"))]
MODELINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.MULTILINE)
SCHEMA = config_schema()

# As a config has it: 8.0 is no integer. JSON Schema counts it as one, which is the one difference.
TYPES = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)
VALIDATOR = extend(Draft202012Validator, type_checker=TYPES)(SCHEMA)

JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([10**12, 0.5, -1.0, 1e-9, "", "8", "adamw", "sgd", "none", "bias", [], [1], {}, {"name": "wsd"}]),
)


def is_accepted(tree: Any) -> bool:
    """What loading a file says of types, names and ranges alone."""
    config, problems = build_config(copy.deepcopy(tree))
    return config is not None and not problems and not list(range_problems(config))


def places(node: Any, path: tuple = ()) -> list[tuple]:
    """The path of each key and each item below a node."""
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [place for key, value in items for place in [(*path, key), *places(value, (*path, key))]]


def holder(tree: Any, path: tuple) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree


@st.composite
def written(draw: st.DrawFn, hint: Any, limits: Range | None = None) -> Any:
    """A value within what ``hint`` allows, as a file holds it: of a section, some of its keys."""
    if is_nullable(hint) and draw(st.booleans()):
        return None
    if alternatives(hint):
        section = draw(st.sampled_from(alternatives(hint)))
        hints = field_hints(section)
        needed = {name for name in hints if field_default(section, name) is dataclasses.MISSING}
        some = set(draw(st.lists(st.sampled_from(list(hints)), max_size=4))) | needed | ({"name"} & set(hints))
        return {name: draw(written(hints[name], ranges(section).get(name))) for name in hints if name in some}
    if item_hint(hint) is not None:
        return draw(st.lists(written(item_hint(hint), limits), max_size=2))
    if literal_values(hint):
        return draw(st.sampled_from(literal_values(hint)))
    if limits is not None and int in members(hint):
        return draw(st.integers(math.ceil(limits.minimum), math.floor(limits.maximum)))
    if limits is not None:
        return draw(st.sampled_from([limits.minimum, limits.maximum]) | st.floats(limits.minimum, limits.maximum))
    return draw(st.booleans() if bool in members(hint) else st.sampled_from(["", "a", "8", "null"]))


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """A right config, as a file holds it, or one in which a value, a key or a missing key may be wrong."""
    tree = draw(written(RunConfig))
    if not tree or draw(st.booleans()):
        return tree
    path = draw(st.sampled_from(places(tree)))
    within = holder(tree, path)
    if isinstance(within, list) or draw(st.booleans()):
        within[path[-1]] = draw(JSON_VALUES)
    elif draw(st.booleans()):
        within[draw(st.sampled_from([f"{path[-1]}z", "name", "lr", "momentum"]))] = draw(JSON_VALUES)
    else:
        del within[path[-1]]
    return tree


@settings(max_examples=200)
@given(trees())
def test_the_schema_accepts_just_what_the_check_of_types_names_and_ranges_accepts(tree):
    assert VALIDATOR.is_valid(tree) == is_accepted(tree), tree


def sections(section: type, path: tuple = ()) -> Iterator[tuple[tuple, type]]:
    """Every section of the tree, each alternative of a union too, with the keys that lead to it: 0 for a list's item."""
    yield path, section
    for name, hint in field_hints(section).items():
        index = (0,) if item_hint(hint) is not None else ()
        for alternative in alternatives(item_hint(hint) or hint):
            yield from sections(alternative, (*path, name, *index))


def planted(section: type) -> Iterator[dict[str, Any]]:
    """The section as little as it can be, and with each key wrong in turn, or at the ends of its range, or gone."""
    hints = field_hints(section)
    needed = [name for name in hints if field_default(section, name) is dataclasses.MISSING]
    least = {name: least_value(hints[name], ranges(section).get(name)) for name in needed}
    least |= {"name": alternative_name(section)} if "name" in hints and literal_values(hints["name"]) else {}
    yield least
    for name in least:
        yield {key: value for key, value in least.items() if key != name}
    for name in hints:
        yield least | {f"{name}z": 1}
        yield {
            name: least_value(hints[name], ranges(section).get(name))
        }  # where `name` is left out: the default's key?
        yield from (least | {name: value} for value in literal_values(hints[name]))
        yield from (least | {name: value} for value in (None, True, 1, 0.5, "8", [], {}, [1], ["a"], [{}], {"name": 1}))
        limits = ranges(section).get(name)
        for value in (limits.minimum, limits.maximum, limits.minimum - 1, limits.maximum * 2) if limits else ():
            yield least | {name: value}
            yield least | {name: [value]}


def least_value(hint: Any, limits: Range | None) -> Any:
    if item_hint(hint) is not None:
        return [least_value(item_hint(hint), limits)]
    return limits.minimum if limits else literal_values(hint)[0] if literal_values(hint) else "a"


def tree_with(path: tuple, leaf: Any) -> Any:
    """The tree that holds nothing but ``leaf``, and what has to be above it: a source has a path."""
    for place, key in reversed(list(enumerate(path))):
        above = {"path": "a"} if path[:place] == ("data", "sources", 0) else {}
        leaf = [leaf] if key == 0 else {**above, key: leaf}
    return leaf


EVERY = {f"{'.'.join(map(str, path))}:{section.__name__}": (path, section) for path, section in sections(RunConfig)}


@pytest.mark.parametrize(("path", "section"), EVERY.values(), ids=EVERY)
def test_planted_faults_of_each_key_are_refused_by_both(path, section):
    trees = [tree_with(path, each) for each in planted(section)]
    assert [tree for tree in trees if VALIDATOR.is_valid(tree) != is_accepted(tree)] == []
    assert any(map(is_accepted, trees)) and not all(map(is_accepted, trees))


def test_each_section_has_a_definition_of_its_own():
    assert len(SCHEMA["$defs"]) == len({section for _, section in sections(RunConfig)})


def test_every_section_and_key_has_a_description():
    bare = [
        f"{name}.{key}"
        for name, section in SCHEMA["$defs"].items()
        for key, value in section["properties"].items()
        if not value.get("description") and "$ref" not in json.dumps(value)
    ]
    assert bare == []
    assert all(section["description"] for section in SCHEMA["$defs"].values())


def test_the_committed_schema_is_this_one_and_a_schema():
    Draft202012Validator.check_schema(SCHEMA)
    assert (CONFIGS / "schema.json").read_text() == schema_text(), (
        "run roundtable config --schema > configs/schema.json"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_config_names_the_schema_and_keeps_to_it(path):
    (where,) = MODELINE.findall(path.read_text())
    assert (path.parent / where).resolve() == CONFIGS / "schema.json"
    assert [error.message for error in VALIDATOR.iter_errors(read_yaml_file(path))] == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"stepz": 1}, []),
        ({"train": {"steps": "many"}}, ["train", "steps"]),
        ({"train": {"steps": 0}}, ["train", "steps"]),
        ({"train": {"steps": None}}, ["train", "steps"]),
        ({"train": {"precision": "int4"}}, ["train", "precision"]),
        ({"optimizer": {"name": "sgd", "beta1": 0.9}}, ["optimizer"]),
        ({"optimizer": {"momentum": 0.9}}, ["optimizer"]),
        ({"data": {"sources": [{"weight": 1}]}}, ["data", "sources", 0]),
        ({"model": {"moe": {"balance": {"name": "fair"}}}}, ["model", "moe", "balance", "name"]),
    ],
)
def test_planted_errors_are_refused_where_they_are(change, where):
    assert not is_accepted(change)
    found = [list(error.absolute_path) for error in VALIDATOR.iter_errors(change)]
    leaves = [list(each.absolute_path) for error in VALIDATOR.iter_errors(change) for each in error.context or ()]
    assert where in found + leaves


def test_the_command_prints_it_and_refuses_what_would_change_nothing(capsys):
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    for extra in (["c.yaml"], ["--keys"], ["c.yaml", "seed=1"]):
        assert main(["config", "--schema", *extra]) == 2
        assert capsys.readouterr().err.count("\n") == 1
