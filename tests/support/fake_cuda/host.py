"""Watches for results that lie on the host instead of a fake GPU, and for copies to it that the host waits for."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
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
    """A context that collects the names of operations whose results lie on the host."""
    made: list[str] = []
    with _HostWatch(made):
        yield made


MADE_OF_NUMBERS = ("tensor", "as_tensor", "asarray", "new_tensor")  # torch functions that take numbers or arrays


class _CopyWatch(TorchFunctionMode):
    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out, name = func(*args, **kwargs), getattr(func, "__name__", "")
        copies = name in MADE_OF_NUMBERS or (name in ("to", "cuda") and args[0].device.type == "cpu")
        if copies and out.device.type == "cuda" and not kwargs.get("non_blocking"):
            caller = next(f for f in traceback.extract_stack()[-2::-1] if "site-packages" not in f.filename)
            self.waits.append(f"{name} at {Path(caller.filename).name}:{caller.lineno}")
        return out


@contextlib.contextmanager
def copies_to_device() -> Iterator[list[str]]:
    """A context that collects copies to the device that the host would wait for, their source not being page-locked."""
    waits: list[str] = []
    with _CopyWatch(waits):
        yield waits
