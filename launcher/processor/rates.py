"""Measures this machine's CPU rates: products by rough shape, bytes by kind of work, messages over gloo.

Each rate is measured by itself, while as many processes measure as ranks of a step would compute at the same time. No
step of the planned config is run.
"""

import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F

from launcher.processor.kernels import kernel_seconds
from launcher.processor.ops import Ask
from launcher.processor.timing import DTYPES, MOVED, RECENT_BYTES, one_after_another, typical_seconds

SHARE_SECONDS = 1.0  # how long each process computes to measure its share of a core; done twice
WIDTH = 256  # elements of a row, where rows are gathered
FRESH_BYTES = 16 << 20  # bytes of a new map whose pages fault
SMALL, LARGE = 1 << 10, 4 << 20  # bytes of the two measured messages


@dataclass(frozen=True)
class Message:
    """The seconds of a collective: ``latency``, plus ``per_byte`` for each byte that a rank sends."""

    latency: float
    per_byte: float


class Call(NamedTuple):
    """Mean seconds of one call of torch, with the Python and DeepSpeed code around it and the latency of messages.

    ``wall`` also includes the time for which ranks wait for each other and for a core; ``processor`` does not.
    """

    wall: float
    processor: float


@dataclass
class Machine:
    """The machine's rates, as seconds by kind of work."""

    cores: int
    busy: int  # the number of processes that measured at the same time
    share: float  # the share of a core that each process gets while all compute, beside other work on the machine
    per_unit: dict[Ask, float] = field(default_factory=dict)  # seconds of a FLOP or byte; the key's phase is empty
    messages: dict[tuple[str, str, int], Message] = field(default_factory=dict)  # collective, dtype, ranks of a group


def core_share() -> float:
    """The share of a core that this process gets while it only computes, measured over SHARE_SECONDS."""
    began, before = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < SHARE_SECONDS:
        pass
    return (time.process_time() - before) / (time.perf_counter() - began)


def unit_seconds(ask: Ask) -> float:
    """Seconds of one FLOP or byte of this kind of work."""
    dtype = DTYPES.get(ask.dtype, torch.float32)
    in_cpp = kernel_seconds(ask.kind, dtype, ask.shape, ask.level)
    if in_cpp is not None:
        return in_cpp
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
    """Seconds of one FLOP of a product of this shape, with factors that no cache holds."""
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
    """Seconds of one FLOP of torch's attention kernel with a mask, as used for pieces of documents, inputs uncached."""
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


def page_seconds() -> float:
    """Seconds of a page fault for each byte: writing to a new map, less writing to an existing one."""

    def map_anew() -> torch.Tensor:
        return torch.frombuffer(mmap.mmap(-1, FRESH_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)

    there = map_anew()
    anew = typical_seconds(lambda: map_anew().zero_())
    return (anew - typical_seconds(there.zero_)) / FRESH_BYTES


def family_seconds(family: str, dtype: torch.dtype, n_bytes: int) -> float:
    """Seconds of one byte that an operation of the family reads or writes."""
    work, moved = example_of(family, dtype, n_bytes)
    return typical_seconds(work) / moved


def example_of(family: str, dtype: torch.dtype, n_bytes: int) -> tuple[Callable[[], object], float]:
    """A typical operation of the family as a function, and the bytes that it moves, about ``n_bytes``.

    Its operands were made RECENT_BYTES ago, as in a step. With an operand that a core's own cache held, sums in fp32
    took a third of the time that they take in steps of the quickstart (AMD EPYC, 2026-11-30, docs/plan.md).
    """
    size = dtype.itemsize
    rows = max(1, n_bytes // (2 * size * WIDTH))
    source = torch.rand(rows, WIDTH).to(dtype)
    other = torch.bfloat16 if family == "cast" and dtype == torch.float32 else torch.float32
    target = torch.empty_like(source, dtype=other if family == "cast" else dtype)
    sources, targets = (one_after_another(each.clone, max(RECENT_BYTES, each.nbytes)) for each in (source, target))
    both = float(source.nbytes + target.nbytes)
    match family:
        case "copy" | "cast":
            return lambda: next(targets).copy_(next(sources)), both
        case "math":
            return lambda: torch.ops.aten.silu.out(next(sources), out=next(targets)), both
        case "sum":
            return lambda: next(sources).sum(-1), float(source.nbytes)
        case "rows":
            order = torch.randperm(rows)
            return lambda: torch.index_select(next(sources), 0, order, out=next(targets)), both
        case "sort":
            numbers = torch.randint(0, 8, (max(16, n_bytes // 24),))
            return lambda: numbers.argsort(stable=True), 2.0 * numbers.nbytes
        case "update":
            return update_example(n_bytes)
        case _:
            return lambda: torch.add(next(sources), next(sources), out=next(targets)), 1.5 * both


def update_example(n_bytes: int) -> tuple[Callable[[], object], float]:
    """A step of torch's fused AdamW as a function, and the bytes of the tensors that it uses, about ``n_bytes``."""
    weight = torch.nn.Parameter(torch.randn(max(16, n_bytes // 16)))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return optimizer.step, 4.0 * weight.nbytes


def measure_rank(asks: Iterable[Ask], wires: Iterable[tuple[str, str, int]], busy: int) -> dict[str, Any]:
    """One process's rates, if it is among the first ``busy``, the times of messages, and its share of a core.

    ``wires`` are (collective, dtype, ranks of a group). All processes call it.
    """
    from launcher.training.heap import keep_heap_from_growing

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
    """The bytes that a rank sends in a collective, as launcher.trace.ops counts them.

    ``n_bytes`` are those of the larger of its input and output.
    """
    times = {"all-reduce": 2.0, "barrier": 0.0}.get(name, 1.0)
    return times * n_bytes * (1.0 if name == "send" else (ranks - 1) / ranks)


def message_seconds(name: str, dtype: torch.dtype, n_bytes: int, group: Any) -> float:
    """The median seconds of a collective whose larger side has ``n_bytes``. All ranks of the group call it."""
    n, place = group.size(), dist.get_rank(group)
    whole = torch.ones(n_bytes // dtype.itemsize // n * n, dtype=dtype)  # divisible by the number of ranks
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
    """One machine's rates from several rounds of measuring: the median of each figure."""
    first = machines[0]
    machine = Machine(first.cores, first.busy, median(each.share for each in machines))
    machine.per_unit = {ask: median(each.per_unit[ask] for each in machines) for ask in first.per_unit}
    for key in first.messages:
        each = [one.messages[key] for one in machines]
        machine.messages[key] = Message(median(one.latency for one in each), median(one.per_byte for one in each))
    return machine


def merged(cores: int, busy: int, found: list[Mapping[str, Any]]) -> Machine:
    """The machine's rates from those of all ranks: the mean rates, and the longest times of messages."""
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
    """The median of the calls' times from several rounds."""
    return Call(median(each.wall for each in calls), median(each.processor for each in calls))
