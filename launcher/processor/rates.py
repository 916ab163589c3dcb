"""What this machine's processor does in a second: products by rough shape, bytes by kind of work, messages over gloo.

Each rate is measured by itself, while as many processes measure as a step's ranks would compute at once; no step of the
config that is planned is run.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from launcher.processor.ops import Ask

SHARE_SECONDS = 1.0  # that each process computes for, to see its share of a core; twice
SECONDS = 0.02  # that each is repeated for, at least
LEAST_CALLS, MOST_CALLS = 3, 200
# Bytes that one operation moves, in the middle of what belongs to each level.
MOVED = {"near": 128 << 10, "shared": 3 << 20, "memory": 48 << 20}
WIDTH = 256  # of rows that are gathered
FRESH_BYTES = 16 << 20
SMALL, LARGE = 1 << 10, 4 << 20  # bytes of a message
REDUCING = ("all-reduce", "reduce-scatter")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Message:
    """A collective takes ``latency``, and as much more a byte that a rank sends."""

    latency: float
    per_byte: float


@dataclass
class Machine:
    """Seconds by what is asked for."""

    cores: int
    busy: int  # processes that measured at once
    share: float  # of a core that each process gets while all of them compute, whatever else the machine does
    per_unit: dict[Ask, float] = field(default_factory=dict)  # of a FLOP, or of a byte; phases are left empty
    messages: dict[tuple[str, str, int], Message] = field(default_factory=dict)  # collective, dtype, ranks of a group
    per_call: dict[tuple[int, str], float] = field(default_factory=dict)  # ZeRO's stage, precision: a call on the host


def core_share() -> float:
    """The share of a core that this process gets while it does nothing but compute."""
    began, before = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < SHARE_SECONDS:
        pass
    return (time.process_time() - before) / (time.perf_counter() - began)


def typical_seconds(work: Callable[[], object]) -> float:
    """The median of a call's processor seconds, after one that warms up: others on the machine move them less."""
    work()
    found, began = [], time.process_time()
    while len(found) < LEAST_CALLS or (time.process_time() - began < SECONDS and len(found) < MOST_CALLS):
        before = time.process_time()
        work()
        found.append(time.process_time() - before)
    return median(found)


def unit_seconds(ask: Ask) -> float:
    """Seconds of one FLOP or byte of what is asked for."""
    dtype = DTYPES.get(ask.dtype, torch.float32)
    match ask.kind:
        case "product":
            return product_seconds(ask.shape, dtype)
        case "attention":
            return attention_seconds(ask.shape, dtype)
        case "pages":
            return max(0.0, page_seconds())
        case _:
            return family_seconds(ask.kind, dtype, MOVED[ask.level])


def product_seconds(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Of one FLOP of a product of this shape."""
    rows, depth, columns, left_turned, right_turned = shape
    left = torch.randn(depth, rows).to(dtype).T if left_turned else torch.randn(rows, depth).to(dtype)
    right = torch.randn(columns, depth).to(dtype).T if right_turned else torch.randn(depth, columns).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype)
    return typical_seconds(lambda: torch.mm(left, right, out=out)) / (2 * rows * depth * columns)


def attention_seconds(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Of one FLOP of torch's kernel with a mask, as pieces of documents take it."""
    from launcher.trace.ops import BACKWARD_PRODUCTS

    is_backward, heads, queries, channels, keys = shape
    q, k, v = (torch.randn(1, heads, each, channels, dtype=dtype) for each in (queries, keys, keys))
    mask = torch.zeros(queries, keys, dtype=dtype)
    flops = 4 * heads * queries * keys * channels

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    if not is_backward:
        with torch.no_grad():
            return typical_seconds(forward) / flops
    for each in (q, k, v):
        each.requires_grad_()
    out = forward()
    grad = torch.ones_like(out)
    seconds = typical_seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return seconds / (BACKWARD_PRODUCTS * flops)


def page_seconds() -> float:
    """Of one byte that is mapped anew: writing to a new tensor, less writing to one that is there."""
    there = torch.empty(FRESH_BYTES, dtype=torch.uint8)
    anew = typical_seconds(lambda: torch.empty(FRESH_BYTES, dtype=torch.uint8).zero_())
    return (anew - typical_seconds(there.zero_)) / FRESH_BYTES


def family_seconds(family: str, dtype: torch.dtype, n_bytes: int) -> float:
    """Of one byte that a family's operation reads or writes."""
    work, moved = example_of(family, dtype, n_bytes)
    return typical_seconds(work) / moved


def example_of(family: str, dtype: torch.dtype, n_bytes: int) -> tuple[Callable[[], object], float]:
    """An operation of the family, and the bytes that it moves: about ``n_bytes``."""
    size = dtype.itemsize
    rows = max(1, n_bytes // (2 * size * WIDTH))
    source = torch.rand(rows, WIDTH).to(dtype)
    target = torch.empty_like(source)
    both = 2.0 * source.nbytes
    match family:
        case "copy":
            return lambda: target.copy_(source), both
        case "cast":
            other = torch.empty_like(source, dtype=torch.bfloat16 if dtype == torch.float32 else torch.float32)
            return lambda: other.copy_(source), float(source.nbytes + other.nbytes)
        case "math":
            return lambda: torch.ops.aten.silu.out(source, out=target), both
        case "sum":
            return lambda: source.sum(-1), float(source.nbytes)
        case "rows":
            order = torch.randperm(rows)
            return lambda: torch.index_select(source, 0, order, out=target), both
        case "sort":
            numbers = torch.randint(0, 8, (max(16, n_bytes // 24),))
            return lambda: numbers.argsort(stable=True), 2.0 * numbers.nbytes
        case "update":
            return update_example(n_bytes)
        case _:
            return lambda: torch.add(source, source, out=target), 1.5 * both


def update_example(n_bytes: int) -> tuple[Callable[[], object], float]:
    """Torch's fused AdamW on so many bytes."""
    weight = torch.nn.Parameter(torch.randn(max(16, n_bytes // 16)))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return optimizer.step, 4.0 * weight.nbytes


def measure_rank(asks: Iterable[Ask], wires: Iterable[tuple[str, str, int]], busy: int) -> dict[str, Any]:
    """One process's rates, where it is one of the ``busy`` first; and all messages' times. All processes call it."""
    from launcher.training.loop import keep_heap_from_growing

    keep_heap_from_growing()
    wires, found = list(wires), {}
    rank, world = 0, 1
    if wires:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        dist.barrier()
    shares = [core_share()]
    if rank < busy:
        found = {ask: unit_seconds(ask) for ask in asks}
    messages = {}
    for name, dtype, ranks in wires:
        groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, world, ranks)]
        group: Any = groups[rank // ranks]
        small, large = (message_seconds(name, DTYPES[dtype], n_bytes, group) for n_bytes in (SMALL, LARGE))
        more = sent_bytes(name, LARGE, ranks) - sent_bytes(name, SMALL, ranks)
        messages[name, dtype, ranks] = Message(small, max(0.0, (large - small) / more) if more else 0.0)
    if wires:
        dist.barrier()
    shares.append(core_share())
    if wires:
        dist.destroy_process_group()
    return {"per_unit": found, "messages": messages, "share": sum(shares) / len(shares)}


def sent_bytes(name: str, n_bytes: int, ranks: int) -> float:
    """What a rank sends, as launcher.trace.ops counts it; ``n_bytes``: of the larger side."""
    times = {"all-reduce": 2.0, "barrier": 0.0}.get(name, 1.0)
    return times * n_bytes * (1.0 if name == "send" else (ranks - 1) / ranks)


def message_seconds(name: str, dtype: torch.dtype, n_bytes: int, group: Any) -> float:
    """The least seconds of a collective whose larger side has ``n_bytes``. All ranks of the group call it."""
    whole = torch.ones(n_bytes // dtype.itemsize, dtype=dtype)
    n, place = group.size(), dist.get_rank(group)
    part, other = whole[: len(whole) // n].clone(), torch.empty_like(whole)
    ranks = dist.get_process_group_ranks(group)

    def work() -> None:
        match name:
            case "all-reduce":
                dist.all_reduce(whole.zero_(), group=group)
            case "all-gather":
                dist.all_gather_into_tensor(other, part, group=group)
            case "reduce-scatter":
                dist.reduce_scatter_tensor(part, whole, group=group)
            case "all-to-all":
                dist.all_to_all_single(other, whole, group=group)
            case "broadcast":
                dist.broadcast(whole, ranks[0], group=group)
            case "send":
                following, preceding = ranks[(place + 1) % n], ranks[place - 1]
                sends = [
                    dist.P2POp(dist.isend, whole, following, group),
                    dist.P2POp(dist.irecv, other, preceding, group),
                ]
                for each in dist.batch_isend_irecv(sends):
                    each.wait()
            case _:
                dist.barrier(group=group)

    found = []
    for number in range(30 if n_bytes == SMALL else 6):
        dist.barrier(group=group)
        began = time.perf_counter()
        work()
        if number:
            found.append(time.perf_counter() - began)
    return min(found)


def merged(cores: int, busy: int, found: list[Mapping[str, Any]]) -> Machine:
    """The ranks' figures as one machine's: the mean of the rates, the longest of the messages."""
    machine = Machine(cores, busy, sum(each["share"] for each in found) / len(found))
    for ask in found[0]["per_unit"]:
        each = [one["per_unit"][ask] for one in found[:busy]]
        machine.per_unit[ask] = sum(each) / len(each)
    for key in found[0]["messages"]:
        each = [one["messages"][key] for one in found]
        machine.messages[key] = Message(max(one.latency for one in each), max(one.per_byte for one in each))
    return machine
