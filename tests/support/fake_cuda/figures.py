"""What a piece of work asks of a GPU: kernels launched, bytes moved, floating-point operations."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that launch nothing: they look at a tensor otherwise, or make one without writing to it.
VIEWS = frozenset(
    [
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "broadcast_tensors",
        "chunk",
        "detach",
        "device",
        "diagonal",
        "empty",
        "empty_like",
        "empty_strided",
        "expand",
        "is_contiguous",
        "is_same_size",
        "lift_fresh",
        "narrow",
        "new_empty",
        "new_empty_strided",
        "numel",
        "permute",
        "reshape",
        "select",
        "size",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "stride",
        "sym_numel",
        "sym_size",
        "sym_stride",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
        "view_as",
    ]
)
PRODUCTS = frozenset(("mm", "addmm", "bmm", "_grouped_mm"))


@dataclass
class Figures:
    """Sums over operations; what an operation reads and writes counts as moved, whatever caches hold."""

    launches: int = 0
    bytes: int = 0
    flops: int = 0  # of matrix products, without attention's

    def __sub__(self, other: "Figures") -> "Figures":
        return Figures(self.launches - other.launches, self.bytes - other.bytes, self.flops - other.flops)


class _Counter(TorchDispatchMode):
    def __init__(self, figures: Figures) -> None:
        super().__init__()
        self.figures = figures

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if name not in VIEWS:
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
            made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
            self.figures.launches += 1
            self.figures.bytes += sum(each.nbytes for each in (*given, *made))
            self.figures.flops += product_flops(name, given)
        return out


def product_flops(name: str, given: list[torch.Tensor]) -> int:
    """Two for each multiplication of a matrix product."""
    if name not in PRODUCTS:
        return 0
    left, right = given[-2:] if name == "addmm" else given[:2]
    if name == "_grouped_mm" and left.dim() == right.dim():  # the weights' gradient: each row in one group
        return 2 * left.shape[0] * left.shape[1] * right.shape[-1]
    many = left.shape[0] if name == "bmm" else 1
    return 2 * many * left.shape[-2] * left.shape[-1] * right.shape[-1]


@contextlib.contextmanager
def counting() -> Iterator[Figures]:
    """The figures of what is done within."""
    figures = Figures()
    with _Counter(figures):
        yield figures
