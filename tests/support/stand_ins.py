"""Checks that the functions which planted faults put in place of others accept the same calls."""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

OURS = ("launcher", "modeling", "parallel", "data")
SEARCHED = (*OURS, "deepspeed.comm", "deepspeed.runtime.zero", "torch.distributed", "torch.optim", "torch._tensor")
ABSENT = object()


def misfits(plant: Callable[[str], None], titles: list[str]) -> dict[str, list[str]]:
    """Fault's title -> the functions whose stand-ins do not accept all calls that the originals accept.

    Each fault is planted with ``plant`` and undone again, except for changes outside of modules and classes.
    """
    import_what_faults_import()
    return {title: sorted(misfits_of(plant, title)) for title in titles}


def misfits_of(plant: Callable[[str], None], title: str) -> Iterator[str]:
    places = list(dict.fromkeys(places_now()))
    before = [dict(vars(place)) for place in places]
    plant(title)
    for place, had in zip(places, before, strict=True):
        for name, original in had.items():
            stand_in = vars(place).get(name, ABSENT)
            if stand_in is original:
                continue
            if not takes_the_calls_of(original, stand_in):
                yield f"{place.__name__}.{name}"
            setattr(place, name, original)
        for name in vars(place).keys() - had.keys():  # inherited before the fault was planted
            if isinstance(vars(place)[name], FunctionType):
                delattr(place, name)


def import_what_faults_import() -> None:
    """Imports all modules that any fault imports, so that they are loaded before the first fault is planted."""
    for file in Path(__file__).parent.glob("*faults*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in filter(lambda name: name.startswith(SEARCHED), names):
                importlib.import_module(name)


def places_now() -> Iterator[Any]:
    """The modules in which faults are planted, and their classes."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith(SEARCHED) and isinstance(module, ModuleType):
            yield module
            yield from (
                each for each in vars(module).values() if issubclass(type(each), type) and each.__module__ == name
            )


def takes_the_calls_of(original: Any, stand_in: Any) -> bool:
    """Whether the stand-in accepts the fewest and the most arguments of the original; True where one is no function."""
    both = [each.__func__ if isinstance(each, staticmethod | classmethod) else each for each in (original, stand_in)]
    if not all(isinstance(each, FunctionType) for each in both):
        return True
    wanted, given = (inspect.signature(each) for each in both)
    parameters = wanted.parameters.values()
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):  # its signature does not say what it accepts
        return True
    for passed in (parameters, [each for each in parameters if each.default is each.empty]):
        placed = [each for each in passed if each.kind <= each.POSITIONAL_OR_KEYWORD]
        named = [each.name for each in passed if each.kind is each.KEYWORD_ONLY]
        try:
            given.bind(*placed, **dict.fromkeys(named))
        except TypeError:
            return False
    return True
