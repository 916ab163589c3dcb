"""Finds races between several streams of a simulated GPU: operations that no wait keeps in order.

Every operation belongs to the stream that is current when it is called. Each stream knows how far the others were
when it last waited for them (vector clocks: Mattern 1989, Virtual Time and Global States of Distributed Systems). Two
operations of different streams on the same memory, one of which writes, must be ordered by such waits; and so must the
last use of memory that the allocator takes back and whatever the computing stream does next. Values do not matter.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.estimate.values import written
from launcher.trace.ops import VIEWS, host_copy

Clock = Counter[str]  # stream -> the number of its operations that are known to have completed


class HostWaits(Exception):
    """Raised where the host would wait for the device."""


class Mark:
    """A point in a stream's order; the stand-in for torch.cuda.Event."""

    def __init__(self, clock: Clock) -> None:
        self.clock = Counter(clock)

    def synchronize(self) -> None:
        raise HostWaits


class Stream:
    """The stand-in for torch.cuda.Stream, with its vector clock."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = Counter()

    def wait_stream(self, other: "Stream") -> None:
        self.clock |= other.clock

    def wait_event(self, mark: Mark) -> None:
        self.clock |= mark.clock

    def record_event(self) -> Mark:
        return Mark(self.clock)

    def synchronize(self) -> None:
        raise HostWaits


class Races(TorchDispatchMode):
    """Collects races in ``found`` while its context ``streams`` is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = Stream("compute")
        self.current = self.compute
        self.made = 0
        self.found: list[str] = []
        self.operations = Counter[str]()  # operations by stream
        self.uses: dict[int, list[tuple[str, int, bool, str]]] = {}  # storage -> stream, number, whether it wrote, name

    @contextlib.contextmanager
    def streams(self) -> Iterator["Races"]:
        """A context in which torch.cuda's streams are those of this object, and all operations are watched."""

        def new(device: Any = None) -> Stream:
            self.made += 1
            return Stream(f"stream {self.made}")

        names = {"Stream": new, "current_stream": lambda device=None: self.current, "stream": self.on}
        with patch.multiple(torch.cuda, **names), self:
            yield self

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """A context in which ``stream`` is the current stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        stream = self.current
        stream.clock[stream.name] += 1
        self.operations[stream.name] += 1
        if name in VIEWS and not name.startswith(("empty", "new_empty")):
            return out
        if host_copy(func, args) and not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
            raise HostWaits
        given = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        writes = {storage(each) for each in written(func, args, kwargs)}
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        inputs = {storage(each) for each in given.values()}
        for each in (*given.values(), *made):
            key = storage(each)
            self.use(each, name, wrote=key in writes or key not in inputs)
        return out

    def use(self, tensor: torch.Tensor, name: str, *, wrote: bool) -> None:
        """Records that an operation of the current stream used a tensor's memory; adds its races to ``found``."""
        key, stream = storage(tensor), self.current
        if key not in self.uses:
            self.uses[key] = []
            weakref.finalize(tensor.untyped_storage(), self.free, key, tensor.device.type)
        for other, number, has_written, what in self.uses[key]:
            if other != stream.name and (wrote or has_written) and stream.clock[other] < number:
                self.found.append(f"{name} on {stream.name} does not wait for {what} on {other}")
        self.uses[key].append((stream.name, stream.clock[stream.name], wrote, name))

    def free(self, key: int, device: str) -> None:
        """Called when nothing refers to the memory any more, so that the computing stream may reuse it.

        Adds each use by another stream that the computing stream has not waited for to ``found``.
        """
        for other, number, _, what in self.uses.pop(key):
            if other != self.compute.name and self.compute.clock[other] < number:
                self.found.append(f"memory of {device} is free before {what} on {other}")


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
