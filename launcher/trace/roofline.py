"""The least time of operations on a device of known rates, and what bounds it (Williams et al. 2009, "Roofline").

The least time of an operation is the longest of four: its FLOPs at the device's rate, its bytes at the memory's
bandwidth, the bytes it sends at the link's bandwidth, and the time to launch its kernels.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from launcher.errors import UserError
from launcher.trace.ops import Op, Work

Bound = Literal["compute", "memory", "launches", "wire"]
DTYPES = {
    torch.float8_e4m3fn: "fp8",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of a device, measured or published; maps are keyed by the names in ``DTYPES``."""

    name: str
    products: Mapping[str, float]  # FLOP/s
    grouped_products: Mapping[str, float]
    attention_forward: Mapping[str, float]
    attention_backward: Mapping[str, float]
    bandwidth: float  # memory bandwidth, bytes/s
    launch_seconds: float
    wires: Mapping[str, float] = field(default_factory=dict)  # part -> bytes/s that a rank sends
    peak: Mapping[str, float] = field(default_factory=dict)  # FLOP/s that MFU is relative to; empty: not known

    def flops_rate(self, work: Work) -> float:
        """FLOP/s of a product. Raises UserError where the device has no rate for its dtype."""
        match work.kind:
            case "grouped product":
                table = self.grouped_products
            case "attention":
                table = self.attention_backward if "backward" in work.name else self.attention_forward
            case _:
                table = self.products
        dtype = DTYPES.get(work.dtype) if work.dtype is not None else None
        if dtype is None or dtype not in table:
            have = ", ".join(table)
            raise UserError([f"{self.name} has no rate for {work.name} in {dtype or work.dtype}; it has {have}"])
        return table[dtype]

    def wire_rate(self, part: str) -> float:
        """Bytes/s over the links that a part of communication uses. Raises UserError where the rate is not known."""
        if part not in self.wires:
            raise UserError([f"{self.name} has no rate for {part}"])
        return self.wires[part]


def least_seconds(op: Op, rates: Rates) -> tuple[float, Bound]:
    """The least seconds of one operation, without the fraction that other operations hide; and what bounds it."""
    work = op.work
    times: dict[Bound, float] = {
        "memory": work.bytes / rates.bandwidth,
        "launches": work.launches * rates.launch_seconds,
    }
    if work.flops:
        times["compute"] = work.flops / rates.flops_rate(work)
    if work.collective is not None:
        times["wire"] = work.sent_bytes / rates.wire_rate(op.part) if work.sent_bytes else 0.0
    bound: Bound = max(times, key=lambda each: times[each])
    return (1 - work.hidden) * times[bound], bound


@dataclass
class Sum:
    """The sums over a group of operations: least seconds, FLOPs, bytes and launches."""

    seconds: float = 0.0  # the least possible
    by_bound: dict[Bound, float] = field(default_factory=dict)
    flops: float = 0.0
    bytes: float = 0.0
    sent_bytes: float = 0.0
    launches: float = 0.0

    def add(self, op: Op, rates: Rates, times: float) -> None:
        """Adds an operation that runs ``times`` times."""
        seconds, bound = least_seconds(op, rates)
        self.seconds += times * seconds
        self.by_bound[bound] = self.by_bound.get(bound, 0.0) + times * seconds
        self.flops += times * op.work.flops
        self.bytes += times * op.work.bytes
        self.sent_bytes += times * op.work.sent_bytes
        self.launches += times * op.work.launches

    @property
    def bound(self) -> Bound | None:
        """What bounds the largest part of the time; None without operations."""
        return max(self.by_bound, key=lambda each: self.by_bound[each]) if self.by_bound else None


def sums_by(ops: Iterable[tuple[Op, float]], rates: Rates) -> dict[tuple[str, str], Sum]:
    """(part, phase) -> the sums over its operations. Each operation comes with the number of times it runs."""
    found: dict[tuple[str, str], Sum] = {}
    for op, times in ops:
        found.setdefault((op.part, op.phase), Sum()).add(op, rates, times)
    return found


def sums_by_name(ops: Iterable[tuple[Op, float]], rates: Rates) -> dict[tuple[str, str], Sum]:
    """(part, operation's name) -> the sums over its calls. Each operation comes with the number of times it runs."""
    found: dict[tuple[str, str], Sum] = {}
    for op, times in ops:
        found.setdefault((op.part, op.work.name), Sum()).add(op, rates, times)
    return found
