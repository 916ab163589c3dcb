"""What this machine's processor does in a second: products by rough shape, bytes by kind of work, messages over gloo.

Each rate is measured by itself, while as many processes measure as a step's ranks would compute at once; no step of the
config that is planned is run.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from launcher.processor.ops import Ask

SHARE_SECONDS = 1.0  # that each process computes for, to see its share of a core; twice
SECONDS = 0.02  # that each is repeated for, at least
LEAST_CALLS, MOST_CALLS = 3, 200
# Bytes that one operation moves, in the middle of what belongs to each level.
MOVED = {"near": 128 << 10, "shared": 3 << 20, "memory": 48 << 20}
WIDTH = 256  # of rows that are gathered
FRESH_BYTES = 16 << 20
COLD_BYTES = 64 << 20  # more than caches hold
SMALL, LARGE = 1 << 10, 4 << 20  # bytes of a message
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Message:
    """A collective takes ``latency``, and as much more a byte that a rank sends."""

    latency: float
    per_byte: float


class Call(NamedTuple):
    """Seconds of one of torch's calls, with the Python and DeepSpeed around it and the messages' own latency.

    ``wall`` holds what ranks wait for each other besides, in the crowd of all of them; ``processor`` does not.
    """

    wall: float
    processor: float


@dataclass
class Machine:
    """Seconds by what is asked for."""

    cores: int
    busy: int  # processes that measured at once
    share: float  # of a core that each process gets while all of them compute, whatever else the machine does
    per_unit: dict[Ask, float] = field(default_factory=dict)  # of a FLOP, or of a byte; phases are left empty
    messages: dict[tuple[str, str, int], Message] = field(default_factory=dict)  # collective, dtype, ranks of a group


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
    """Of one FLOP of a product of this shape, whose factors come from memory."""
    rows, depth, columns, left_turned, right_turned = shape

    def factors() -> tuple[torch.Tensor, ...]:
        left = torch.ones(depth, rows, dtype=dtype).T if left_turned else torch.ones(rows, depth, dtype=dtype)
        right = torch.ones(columns, depth, dtype=dtype).T if right_turned else torch.ones(depth, columns, dtype=dtype)
        return left, right, torch.empty(rows, columns, dtype=dtype)

    given = one_after_another(factors)

    def work() -> None:
        left, right, out = next(given)
        torch.mm(left, right, out=out)

    return typical_seconds(work) / (2 * rows * depth * columns)


def attention_seconds(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    """Of one FLOP of torch's kernel with a mask, as pieces of documents take it, its inputs from memory."""
    from launcher.trace.ops import BACKWARD_PRODUCTS

    is_backward, heads, queries, channels, keys = shape
    mask = torch.zeros(queries, keys, dtype=dtype)
    flops = 4 * heads * queries * keys * channels

    def heads_of() -> tuple[torch.Tensor, ...]:
        return tuple(torch.ones(1, heads, each, channels, dtype=dtype) for each in (queries, keys, keys))

    def forward(given: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return F.scaled_dot_product_attention(*given, attn_mask=mask)

    if not is_backward:
        inputs = one_after_another(heads_of)
        with torch.no_grad():
            return typical_seconds(lambda: forward(next(inputs))) / flops

    def passed() -> tuple[Any, ...]:
        given = heads_of()
        for each in given:
            each.requires_grad_()
        out = forward(given)
        return out, given, torch.ones_like(out)

    passes = one_after_another(passed)

    def backward() -> None:
        out, given, grad = next(passes)
        torch.autograd.grad(out, given, grad, retain_graph=True)

    return typical_seconds(backward) / (BACKWARD_PRODUCTS * flops)


def one_after_another(make: Callable[[], tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """What is made, again and again: so many that, when one comes again, no cache holds it any more.

    A step is through hundreds of megabytes before it comes to the same weights again.
    """
    first = make()
    size = sum(each.nbytes for each in tree_leaves(first) if isinstance(each, torch.Tensor))
    return cycle([first, *(make() for _ in range(min(MOST_CALLS, COLD_BYTES // size)))])


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
    from launcher.training.heap import keep_heap_from_growing

    keep_heap_from_growing()
    wires, found = list(wires), {}
    rank, world = 0, 1
    if wires:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        dist.barrier()
    shares = [core_share()]
    if rank < busy:  # pages first: memory that others give back to the heap would be taken in their place
        found = {ask: unit_seconds(ask) for ask in sorted(asks, key=lambda ask: ask.kind != "pages")}
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
    """The median seconds of a collective whose larger side has ``n_bytes``. All ranks of the group call it."""
    n, place = group.size(), dist.get_rank(group)
    whole = torch.ones(n_bytes // dtype.itemsize // n * n, dtype=dtype)  # as many numbers of each rank
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
    return median(found)


def typical(machines: Sequence[Machine]) -> Machine:
    """The median of what was measured in several rounds, figure by figure."""
    first = machines[0]
    machine = Machine(first.cores, first.busy, median(each.share for each in machines))
    machine.per_unit = {ask: median(each.per_unit[ask] for each in machines) for ask in first.per_unit}
    for key in first.messages:
        each = [one.messages[key] for one in machines]
        machine.messages[key] = Message(median(one.latency for one in each), median(one.per_byte for one in each))
    return machine


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


def slowest(calls: Sequence[Call]) -> Call:
    """The largest wall time of the ranks' calls, as all wait for the last, and their mean processor time."""
    return Call(max(each.wall for each in calls), sum(each.processor for each in calls) / len(calls))


def typical_call(calls: Sequence[Call]) -> Call:
    """The median of several rounds."""
    return Call(median(each.wall for each in calls), median(each.processor for each in calls))
