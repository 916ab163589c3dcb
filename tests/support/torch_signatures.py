"""Lists Roundtable's calls of torch, and checks that each version that pyproject.toml allows accepts their arguments.

The signatures of versions that are not installed are data, read out of their wheels:

    pip download --no-deps torch==2.11.0 --dest wheels
    python tests/support/torch_signatures.py wheels/*.whl

writes tests/data/torch_signatures.json anew. Functions in Python are found where they are defined, those in C++ by
the stubs (``.pyi``) that torch ships, operators (``torch.ops.aten``) by the schemas in its headers. Wheels for other
systems (macOS', say, which are small) hold the same.
"""

import ast
import importlib
import inspect
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "torch_signatures.json"
PARTS = ("launcher", "modeling", "parallel", "data")
STUBS = (
    "torch/_C/_VariableFunctions.pyi",
    "torch/_C/_nn.pyi",
    "torch/_C/__init__.pyi",
    "torch/_C/_distributed_c10d.pyi",
    "torch/_C/_autograd.pyi",
)

OPERATORS = "torch.ops.aten."
VARLEN = "torch.nn.attention.varlen.varlen_attn"

Signature = dict[str, Any]  # "positional" and "keyword": names; "rest" and "options": whether more are taken
Reader = Callable[[str], str | None]  # returns the text of one of torch's files, None where there is no such file


@dataclass(frozen=True)
class Call:
    """One call of torch in Roundtable's sources."""

    place: str  # file:line
    name: str  # as resolved: "torch.distributed.all_reduce"
    n_positional: int
    keywords: tuple[str, ...]
    is_open: bool  # * or ** is passed, so that only the keywords can be checked


def house_files() -> list[Path]:
    """Roundtable's own sources, without tests and benchmarks."""
    return [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]


def calls_in(source: str, file: str) -> Iterator[Call]:
    """Every call in the file of a function or class that it has imported from torch or one of its modules."""
    if "torch" not in source:
        return
    nodes = list(ast.walk(ast.parse(source)))
    aliases = dict(_aliases(nodes))
    for node in nodes:
        if not isinstance(node, ast.Call) or (name := _dotted(node.func)) is None:
            continue
        first, _, rest = name.partition(".")
        if first not in aliases:
            continue
        full = f"{aliases[first]}.{rest}" if rest else aliases[first]
        keywords = tuple(each.arg for each in node.keywords if each.arg is not None)
        is_open = any(isinstance(each, ast.Starred) for each in node.args) or len(keywords) < len(node.keywords)
        n_positional = sum(not isinstance(each, ast.Starred) for each in node.args)
        yield Call(f"{file}:{node.lineno}", full, n_positional, keywords, is_open)


def _aliases(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """The file's names for what it imports from torch: "dist" -> "torch.distributed"."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "torch":
                    yield (each.asname, each.name) if each.asname else ("torch", "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def _dotted(node: ast.AST) -> str | None:
    """The text "a.b.c" of an expression made of names alone; None for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def methods_in(source: str) -> set[str]:
    """The names of all methods that the file calls, of tensors and of others."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {each.attr for each in calls if isinstance(each, ast.Attribute)}


@cache
def home_of(name: str) -> str | None:
    """Where the installed torch defines a name: "torch.nn.functional:silu" in Python, "C:gelu" in C++.

    None where it is not a function or class, such as a method of an object that a module holds.
    """
    parts = name.split(".")
    found: Any = None
    holder: Any = None
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                return None
            holder, found = found, getattr(found, attribute)
        break
    found = inspect.unwrap(found) if callable(found) else found
    if inspect.isfunction(found) or (inspect.isclass(found) and found.__module__.startswith("torch.")):
        if found.__module__.startswith("torch._C"):
            return f"C:{found.__qualname__}"
        # torch.func shows functions of torch._functorch as its own.
        is_shown = inspect.isfunction(found) and found.__module__ == "torch.func"
        return f"{found.__globals__['__name__'] if is_shown else found.__module__}:{found.__qualname__}"
    if parts[:2] == ["torch", "linalg"]:
        return f"torch.linalg:{parts[-1]}"
    if inspect.isclass(holder):
        return f"C:{holder.__name__}.{parts[-1]}"
    return f"C:{parts[-1]}" if inspect.isroutine(found) or inspect.isclass(found) else None


def signatures_of(home: str, read: Reader) -> list[Signature] | None:
    """The signatures of a function or class at ``home``, by the files that ``read`` gives; None where it is missing."""
    module, _, qualname = home.partition(":")
    path = module.replace(".", "/")
    found = _defined(f"{path}.py", qualname, read) or _defined(f"{path}/__init__.py", qualname, read)
    found = found or [each for file in _taken_from(path, qualname, read) for each in _defined(file, qualname, read)]
    found = found or [each for stub in STUBS for each in _defined(stub, qualname, read)]
    return found or _documented(module, qualname, read) or None


@cache
def _parsed(path: str, read: Reader) -> ast.Module | None:
    text = read(path)
    return None if text is None else ast.parse(text)


def _defined(path: str, qualname: str, read: Reader) -> list[Signature]:
    """The signatures of the functions, or of the class, of that name in a file."""
    tree = _parsed(path, read)
    scopes: list[Any] = [] if tree is None else [tree]
    *outer, name = qualname.split(".")
    for each in outer:
        scopes = [node for scope in scopes for node in _body(scope) if named(node, each)]
    found: list[Signature] = []
    for node in (node for scope in scopes for node in _body(scope) if named(node, name)):
        if isinstance(node, ast.FunctionDef):
            found.append(_signature(node, bound=bool(outer)))
        elif isinstance(node, ast.ClassDef):
            made = [each for each in _body(node) if named(each, "__init__") or named(each, "__new__")]
            found += [_signature(each, bound=True) for each in made] or [_anything()]
    return found


def _taken_from(path: str, name: str, read: Reader) -> list[str]:
    """The file of the module from which a package takes over a function: ``name = _module.name``."""
    tree = _parsed(f"{path}/__init__.py", read)
    given = [
        node.value
        for node in (tree.body if tree else [])
        if isinstance(node, ast.Assign) and any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
    ]
    return [
        f"{path}/{value.value.id}.py"
        for value in given
        if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.attr == name
    ]


def _documented(module: str, name: str, read: Reader) -> list[Signature]:
    """The signatures of a torch.linalg function from its docstring, "linalg.qr(A, ...)", since it has no stub."""
    text = read(f"{module.replace('.', '/')}/__init__.py") or ""
    lines = re.findall(rf"^(?:torch\.)?linalg\.{name}\((.*)\) ->", text, re.MULTILINE)
    functions = [ast.parse(f"def {name}({parameters}): ...").body[0] for parameters in lines]
    return [_signature(each, bound=False) for each in functions if isinstance(each, ast.FunctionDef)]


def _body(node: ast.AST | None) -> Iterator[Any]:
    """The statements in the body of a module or class, including those under ``if`` and ``try``."""
    for each in getattr(node, "body", []):
        if isinstance(each, ast.If | ast.Try):
            yield from _body(each)
            yield from (
                inner for branch in each.orelse for inner in ([branch] if hasattr(branch, "name") else _body(branch))
            )
        else:
            yield each


def _signature(node: ast.FunctionDef, bound: bool) -> Signature:
    """The signature of a function definition; of a method (``bound``) without self or cls."""
    arguments = node.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    return {
        "positional": positional[1:] if bound and positional[:1] in (["self"], ["cls"]) else positional,
        "keyword": [each.arg for each in arguments.kwonlyargs],
        "rest": arguments.vararg is not None,
        "options": arguments.kwarg is not None,
    }


def operator_signatures(name: str, read: Reader) -> list[Signature]:
    """The signatures of all overloads of an operator such as "torch.ops.aten._flash_attention_forward"."""
    plain = name.removeprefix(OPERATORS).partition(".")[0]
    header = read(f"torch/include/ATen/ops/{plain}_ops.h") or ""
    return [schema_signature(schema) for schema in re.findall(r'schema_str = "([^"]*)"', header)]


def schema_signature(schema: str) -> Signature:
    """The signature of a schema such as "name(Tensor a, int b=1, *, float? c=None) -> Tensor"."""
    parameters = schema[schema.index("(") + 1 : schema.index(") ->")].split(", ")
    names = [each.split("=")[0].rpartition(" ")[2] for each in parameters if each]
    end = names.index("*") if "*" in names else len(names)
    return {"positional": names[:end], "keyword": names[end + 1 :], "rest": False, "options": False}


def is_operator(call: Call) -> bool:
    """Whether the call is of one of torch's operators (torch.ops.aten)."""
    return call.name.startswith(OPERATORS)


def _anything() -> Signature:
    """A signature that accepts anything, for a class that inherits its constructor."""
    return {"positional": [], "keyword": [], "rest": True, "options": True}


def takes(signature: Signature, call: Call) -> bool:
    """Whether the signature accepts the call's arguments."""
    names = {*signature["positional"], *signature["keyword"]}
    if not signature["options"] and not names.issuperset(call.keywords):
        return False
    return (
        call.is_open
        or signature["rest"]
        or call.n_positional <= len(signature["positional"])
        or (
            # C++ takes sizes and dims one by one where the stub has a sequence.
            len(signature["positional"]) == 1
        )
    )


def tensor_methods(read: Reader) -> set[str]:
    """The names of a tensor's methods, by the stub of the class in C++ and by the class in Python."""
    classes = (("torch/_C/__init__.pyi", "TensorBase"), ("torch/_tensor.py", "Tensor"))
    bodies = [_body(node) for path, name in classes for node in _body(_parsed(path, read)) if named(node, name)]
    return {node.name for body in bodies for node in body if isinstance(node, ast.FunctionDef)}


def named(node: Any, name: str) -> bool:
    """Whether the node defines that name."""
    return getattr(node, "name", None) == name


def in_wheel(wheel: Path) -> Reader:
    """A reader of the files in a wheel."""
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    return lambda path: archive.read(path).decode() if path in names else None


def imported(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a file imports from torch's modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node.module or "", each.name) for each in node.names)


def is_there(module: str, name: str, read: Reader) -> bool:
    """Whether a version's module has that name: as a module in it, or as a word in its text."""
    path = module.replace(".", "/")
    if any(read(f"{path}/{name}{end}") is not None for end in (".py", "/__init__.py")):
        return True
    texts = [read(f"{path}.py"), read(f"{path}/__init__.py")]
    return any(re.search(rf"\b{name}\b", text) for text in texts if text is not None)


def house_imports() -> set[tuple[str, str]]:
    """(module, name) of everything that Roundtable imports from torch's modules."""
    return {pair for path in house_files() for pair in imported(path.read_text())}


# Calls through a variable, which cannot be found by reading the source.
HELD = (Call("modeling/kernels/attention.py", VARLEN, 7, ("scale", "window_size"), is_open=False),)


def house_calls() -> list[Call]:
    """All calls of torch in Roundtable's sources."""
    return [*HELD] + [
        call for path in house_files() for call in calls_in(path.read_text(), str(path.relative_to(ROOT)))
    ]


def house_methods() -> set[str]:
    """The names of all methods that Roundtable calls and that the installed torch's C++ tensor class has."""
    from torch._C import TensorBase

    called = {name for path in house_files() for name in methods_in(path.read_text())}
    return {name for name in called if inspect.ismethoddescriptor(getattr(TensorBase, name, None))}


def facts(read: Reader) -> dict[str, Any]:
    """The signatures, imports and tensor methods of one version of torch, as the test's data file holds them."""
    homes = sorted({home for call in house_calls() if (home := home_of(call.name)) is not None})
    operators = sorted({call.name for call in house_calls() if is_operator(call)})
    return {
        "functions": {home: signatures_of(home, read) for home in homes},
        "operators": {name: operator_signatures(name, read) for name in operators},
        "imports": sorted(f"{module}.{name}" for module, name in house_imports() if is_there(module, name, read)),
        "tensor_methods": sorted(house_methods() & tensor_methods(read)),
    }


def main(wheels: Sequence[str]) -> None:
    """Writes the data file from the wheels, whose file names contain the versions."""
    found = {Path(wheel).name.split("-")[1].partition("+")[0]: facts(in_wheel(Path(wheel))) for wheel in wheels}
    DATA.write_text("{\n" + ",\n".join(map(_lines, sorted(found.items()))) + "\n}\n")


def _lines(of_version: tuple[str, dict[str, Any]]) -> str:
    """One version's facts as JSON with a line for each function, so that diffs of the file are readable."""
    version, known = of_version
    rest = [f"{json.dumps(key)}: {json.dumps(known[key])}" for key in ("imports", "tensor_methods")]
    for key in ("operators", "functions"):
        lines = (f"{json.dumps(name)}: {json.dumps(known[key][name])}" for name in sorted(known[key]))
        rest.append(f"{json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n}")
    return f"{json.dumps(version)}: {{{rest[0]}, {rest[1]},\n" + ",\n".join(rest[2:]) + "}"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
