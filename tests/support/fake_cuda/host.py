"""What goes between the host and a fake GPU: results that are left on the host, and copies that it waits for."""

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
    """The operations within whose result lies on the host."""
    made: list[str] = []
    with _HostWatch(made):
        yield made


MADE_OF_NUMBERS = ("tensor", "as_tensor", "asarray", "new_tensor")  # torch's names: of Python's numbers, or of arrays


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
    """The copies within to the device that a CUDA device's host waits for: their source is not page-locked."""
    waits: list[str] = []
    with _CopyWatch(waits):
        yield waits
