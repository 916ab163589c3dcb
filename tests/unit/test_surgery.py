"""No method is replaced on a living object, and nothing is known by a pattern on its name: what follows is stated."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [
    path for package in ("launcher", "modeling", "parallel", "data") for path in sorted((ROOT / package).rglob("*.py"))
]
ROOM = ROOT / "parallel" / "zero"  # tests/unit/test_deepspeed_room.py judges it
MATCHES = {"endswith", "startswith", "fnmatch", "fnmatchcase", "match", "search", "fullmatch", "removeprefix"}
PARTS = (".weight", "weight", ".bias", ".experts", "norm.", ".attention", ".feed_forward", "router.", "embed.", "head.")
# Tables of names are what these are for: transformers' files have no dims.
NAMERS = {"modeling/families/weights.py"}


@functools.cache
def methods_of_modules() -> set[str]:
    """The methods of every class in modeling/, and those that any module, optimizer or engine has."""
    found = {"forward", "backward", "step", "__class__", "__call__"}
    for path in FILES:
        if path.is_relative_to(ROOT / "modeling"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found |= {each.name for each in node.body if isinstance(each, ast.FunctionDef) and is_method(each)}
    return found - {"__init__"}


def is_method(function: ast.FunctionDef) -> bool:
    return not any("property" in ast.unparse(each) for each in function.decorator_list)


def replaced(tree: ast.AST, methods: set[str]) -> Iterator[str]:
    """Assignments to something that is a method, of other objects than a method's own."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in methods and ast.unparse(target.value) != "self":
                yield f"line {node.lineno}: {ast.unparse(target)} = ..."


def matched(tree: ast.AST) -> Iterator[str]:
    """Comparisons of a name's part with a part of a weight's name, and of a class's name with anything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            words = [each.value for part in node.args for each in ast.walk(part) if isinstance(each, ast.Constant)]
            if name in MATCHES and any(isinstance(word, str) and word.strip("*").endswith(PARTS) for word in words):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Compare) and any(isinstance(each, ast.In | ast.NotIn) for each in node.ops):
            word = node.left.value if isinstance(node.left, ast.Constant) else None
            if isinstance(word, str) and word.startswith(".") and word.endswith(PARTS):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Match | ast.Compare):
            asked = ast.unparse(node.subject if isinstance(node, ast.Match) else node)
            if ".__name__" in asked and ("type(" in asked or "__class__" in asked):
                yield f"line {node.lineno}: asks for a class's name"


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(ROOT).as_posix() for path in FILES])
def test_nothing_is_replaced_or_guessed(path):
    tree = ast.parse(path.read_text())
    assert path.is_relative_to(ROOM) or list(replaced(tree, methods_of_modules())) == []
    assert path.relative_to(ROOT).as_posix() in NAMERS or list(matched(tree)) == []


@pytest.mark.parametrize(
    "line",
    [
        "layer.attention.forward = around(layer.attention.forward)",
        "engine.step = lambda lr: None",
        "layer.add_feed_forward = again(layer.add_feed_forward)",
        "router.choose = recorded",
        "module.__class__ = Other",
    ],
)
def test_planted_replacement_is_found(line):
    assert list(replaced(ast.parse(line), methods_of_modules()))


@pytest.mark.parametrize(
    "line",
    [
        "is_norm = name.endswith('norm.weight')",
        "cut = fnmatchcase(name, '*.experts.*') or fnmatchcase(name, '*.down.weight')",
        "decays = '.weight' in name",
        "match type(optimizer).__name__:\n    case 'SGD':\n        pass",
        "is_moe = type(module).__name__ == 'MoE'",
    ],
)
def test_planted_pattern_is_found(line):
    assert list(matched(ast.parse(line)))
