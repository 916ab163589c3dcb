"""Which operations leave their result on the host, while the tensors that matter are on a fake GPU."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _HostWatch(TorchDispatchMode):
    def __init__(self, made: list[str]) -> None:
        super().__init__()
        self.made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if any(each.device.type == "cpu" for each in tensors):
            self.made.append(func._schema.name)
        return out


@contextlib.contextmanager
def on_host() -> Iterator[list[str]]:
    """The operations within whose result lies on the host."""
    made: list[str] = []
    with _HostWatch(made):
        yield made
