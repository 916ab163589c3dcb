"""Lists the numbers in a package's source: module constants, defaults of arguments and fields, and bare numbers."""

import ast
import operator
from collections.abc import Callable, Iterator
from pathlib import Path

SMALLEST_BARE = 8  # bare numbers below it are dims, exponents and halves, not sizes
SMALLEST_DEFAULT = 2  # 0 and 1 are starts of counts, or mean none


def numbers_in(folder: Path) -> dict[str, float]:
    """The numbers by place: "parallel.mesh.NAME", "….function(argument)", "….Class.field" or "….function: 500"."""
    found: dict[str, float] = {}
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        found |= dict(_of_body(ast.parse(path.read_text()).body, module))
    return found


def _of_body(body: list[ast.stmt], where: str) -> Iterator[tuple[str, float]]:
    for node in body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                number = value_of(value)
                if number is None:
                    yield from _bare(value, f"{where}.{name}")
                elif abs(number) >= SMALLEST_DEFAULT or name.isupper():
                    yield f"{where}.{name}", number
            case ast.ClassDef(name=name, body=inner):
                yield from _of_body(inner, f"{where}.{name}")
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield from _of_function(node, f"{where}.{name}")
            case _:
                yield from _bare(node, where)


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef, where: str) -> Iterator[tuple[str, float]]:
    given = node.args
    named = [*zip(reversed([*given.posonlyargs, *given.args]), reversed(given.defaults), strict=False)]
    named += [(name, default) for name, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default]
    for argument, default in named:
        number = value_of(default)
        if number is not None and abs(number) >= SMALLEST_DEFAULT:
            yield f"{where}({argument.arg})", number
    for statement in node.body:
        yield from _bare(statement, where)


def _bare(node: ast.AST, where: str) -> Iterator[tuple[str, float]]:
    """Bare numbers within a node, an expression of numbers counting as one number.

    The bounds of config keys are left out, since they only reject input.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Interval":
        return
    number = value_of(node) if isinstance(node, ast.expr) else None
    if number is not None:
        if abs(number) >= SMALLEST_BARE:
            yield f"{where}: {number:g}", number
        return
    for inner in ast.iter_child_nodes(node):
        yield from _bare(inner, where)


OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.USub: operator.neg,
}


def value_of(node: ast.expr) -> float | None:
    """The value of an expression made of numbers alone, such as 16 << 20; None for any other."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            parts = [value_of(left), value_of(right)]
        case ast.UnaryOp(op=op, operand=operand):
            parts = [value_of(operand)]
        case _:
            return None
    apply = OPERATORS.get(type(op))
    return None if apply is None or None in parts else apply(*parts)
