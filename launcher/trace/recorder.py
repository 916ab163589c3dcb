"""Records every torch operation by part of the model, and the bytes that tensors hold over time.

Works with real and with fake tensors, on any device. A tensor's storage counts from the operation that made it until
nothing refers to it.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.trace.ops import Op, Phase, Work, host_copy, work_of
from launcher.trace.parts import Axes, part_of, wire_part
from launcher.trace.regions import Regions

# The uses of memory, in the order in which a picture stacks them.
HOLDERS = ("weights", "masters", "optimizer state", "gradients", "activations", "backward", "other")


@dataclass
class Memory:
    """Bytes by use (HOLDERS) over time, and at the moment of peak memory."""

    times: list[float] = field(default_factory=list)  # seconds since the beginning
    held: list[dict[str, int]] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    at_peak: dict[str, int] = field(default_factory=dict)
    peak_seconds: float = 0.0
    peak_phase: str = ""

    @property
    def peak_bytes(self) -> int:
        """The peak memory in bytes."""
        return sum(self.at_peak.values())


class Recorder(TorchDispatchMode):
    """Records operations and memory while it is entered.

    ``clock`` returns the time in seconds at which memory is plotted; it is called after each operation and given it
    (None: the wall clock). ``device`` is the kind of device whose memory counts; host memory counts only for "cpu".
    ``held`` names the uses of storages that exist already. Others that exist are found when operations use them, and
    count as "other" from the beginning on ("gradients" where gradients are summed up).
    """

    def __init__(
        self,
        regions: Regions,
        axes: Axes,
        clock: Callable[[Op | None], float] | None = None,
        held: Mapping[str, Iterable[torch.Tensor]] | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.device = device
        self.regions, self.axes = regions, axes
        self.ops: list[Op] = []
        self.host_bytes: Counter[Phase] = Counter()  # copied between the device and the host, beside the operations
        self.memory = Memory()
        self.live: Counter[str] = Counter()
        self.known: dict[int, int] = {}  # storage -> its bytes
        self.holders: dict[int, str] = {}  # storage -> what it is for
        self.met: Counter[str] = Counter()  # bytes held before the beginning, of storages met later
        self.met_by: list[Counter[str]] = []  # the same after each operation
        started = time.perf_counter()
        self.clock = clock or (lambda op: time.perf_counter() - started)
        for holder, tensors in (held or {}).items():
            for tensor in tensors:
                self.hold(tensor, holder)
        self.snapshot(None, "forward")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        work = work_of(func, args, kwargs, out)
        region, phase = self.regions.now()
        self.host_bytes[phase] += host_copy(func, args)
        op = None
        if work is not None:
            op = Op(work, self.part(work, region), phase)
            self.ops.append(op)
        in_sums = region == "gradients"
        for each in tree_leaves((args, kwargs)):
            kept = "gradients" if in_sums else "other"
            if isinstance(each, torch.Tensor) and self.hold(each, kept):
                self.met[kept] += each.untyped_storage().nbytes()
        holder = "gradients" if in_sums else {"forward": "activations", "update": "other"}.get(phase, "backward")
        made = [self.hold(each, holder) for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        if op is not None or any(made):
            self.snapshot(op, phase)
        return out

    def part(self, work: Work, region: Any) -> str:
        """The part that an operation of a region belongs to."""
        if work.collective is not None:
            return wire_part(region, work.collective, self.axes)
        return part_of(region, work.kind)

    def hold(self, tensor: torch.Tensor, holder: str) -> bool:
        """Counts a tensor's storage, once; returns whether it was new."""
        if tensor.device.type == "cpu" != self.device:
            return False
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # a tensor without one
            return False
        key = storage._cdata
        if key in self.known:
            return False
        n_bytes = storage.nbytes()
        self.known[key] = n_bytes
        self.holders[key] = holder
        self.live[holder] += n_bytes
        weakref.finalize(storage, self.release, key)
        return True

    def release(self, key: int) -> None:
        """Subtracts a storage's bytes, once nothing refers to it any more."""
        self.live[self.holders.pop(key)] -= self.known.pop(key)

    def sort(self, held: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """Reassigns storages that are counted already to other uses, from the next snapshot on: use -> tensors."""
        for holder, tensors in held.items():
            for tensor in tensors:
                key = tensor.untyped_storage()._cdata
                if key in self.known:
                    self.live[self.holders[key]] -= self.known[key]
                    self.live[holder] += self.known[key]
                    self.holders[key] = holder

    def snapshot(self, op: Op | None, phase: str) -> None:
        """Adds the bytes now held, after ``op``, to the memory over time."""
        now = {holder: self.live[holder] for holder in HOLDERS}
        memory = self.memory
        memory.times.append(self.clock(op))
        memory.held.append(now)
        memory.phases.append(phase)
        self.met_by.append(self.met.copy())

    def finish(self) -> Memory:
        """The memory over time and its peak; storages found while recording count from the beginning on."""
        memory = self.memory
        for now, met in zip(memory.held, self.met_by, strict=True):
            for holder, n_bytes in self.met.items():
                now[holder] += n_bytes - met[holder]
        self.met_by = [self.met] * len(self.met_by)
        totals = [sum(now.values()) for now in memory.held]
        most = max(range(len(totals)), key=totals.__getitem__)
        memory.at_peak, memory.peak_seconds, memory.peak_phase = (
            dict(memory.held[most]),
            memory.times[most],
            memory.phases[most],
        )
        return memory
