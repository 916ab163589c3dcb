"""Records each rank's communications in the order in which it starts them, and checks for deadlocks on NCCL.

gloo buffers small messages, so communications that complete on gloo can deadlock on NCCL: there a send completes only
with its receive, and whatever a rank starts on one stream waits for what it started before. The model here is the
strictest: all communications of a rank, in whatever group, form one queue. What completes in it completes on NCCL.
"""

import contextlib
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from launcher.estimate.ranks import as_rank

COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "all_gather_single",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)


@dataclass(frozen=True)
class Begun:
    """One communication: its kind, the ranks of its group, and for a send or receive the other rank."""

    kind: str
    ranks: tuple[int, ...]
    peer: int | None = None

    @property
    def partner(self) -> str | None:
        """The kind that the other rank of a transfer must start; None for a collective."""
        return {"send": "recv", "recv": "send"}.get(self.kind)


Queue = list[tuple[Begun, ...]]  # communications that are started together form one entry


@contextlib.contextmanager
def recording() -> Iterator[Queue]:
    """A context that records this thread's communications in the queue that it gives."""
    with recording_threads() as queues:
        yield queues[threading.current_thread().name]


@contextlib.contextmanager
def recording_threads() -> Iterator[dict[str, Queue]]:
    """A context that records this process's communications, in a queue for each thread by the thread's name."""
    queues: dict[str, Queue] = defaultdict(list)
    batches: dict[str, list[Begun]] = {}  # of threads that are within batch_isend_irecv

    def add(begun: Begun) -> None:
        name = threading.current_thread().name
        if name in batches:
            batches[name].append(begun)
        else:
            queues[name].append((begun,))

    def collective(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any, *arguments: Any, **options: Any) -> Any:
            add(Begun(kind, tuple(distributed_c10d.get_process_group_ranks(group))))
            return original(group, *arguments, **options)

        return run

    def transfer(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any, tensors: Any, peer: int, *arguments: Any, **options: Any) -> Any:
            ranks = tuple(distributed_c10d.get_process_group_ranks(group))
            add(Begun(kind, ranks, ranks[peer]))
            return original(group, tensors, peer, *arguments, **options)

        return run

    begin_all = distributed_c10d.batch_isend_irecv

    def batch(transfers: Sequence[Any]) -> Any:
        name = threading.current_thread().name
        batches[name] = []
        try:
            return begin_all(transfers)
        finally:
            queues[name].append(tuple(batches.pop(name)))

    with contextlib.ExitStack() as stack:
        for kind in COLLECTIVES:
            if hasattr(dist.ProcessGroup, kind):
                _replace(stack, dist.ProcessGroup, kind, collective(kind, getattr(dist.ProcessGroup, kind)))
        for kind in ("send", "recv"):
            _replace(stack, dist.ProcessGroup, kind, transfer(kind, getattr(dist.ProcessGroup, kind)))
        for module in (dist, distributed_c10d):
            _replace(stack, module, "batch_isend_irecv", batch)
        yield queues


def _replace(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, vars(owner)[name])
    setattr(owner, name, value)


def stuck(queues: Sequence[Queue]) -> list[str]:
    """One line for each rank that waits forever, with what it waits for; empty where all queues complete."""
    heads = [0] * len(queues)
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while heads[rank] < len(queue) and (together := _meeting(queues, heads, rank)) is not None:
                for each in together:
                    heads[each] += 1
                moved = True
    return [
        f"rank {rank} waits in {number + 1} of {len(queue)}: {', '.join(map(str, queue[number]))}"
        for rank, (queue, number) in enumerate(zip(queues, heads, strict=True))
        if number < len(queue)
    ]


def _meeting(queues: Sequence[Queue], heads: Sequence[int], rank: int) -> set[int] | None:
    """The ranks whose first entries complete together with that of ``rank``; None where they cannot complete yet."""
    found: set[int] = set()
    open_ranks = [rank]
    while open_ranks:
        one = open_ranks.pop()
        if one in found:
            continue
        if heads[one] >= len(queues[one]):
            return None
        found.add(one)
        for begun, times in Counter(queues[one][heads[one]]).items():
            if begun.partner is None:
                others = [(other, begun) for other in begun.ranks if other != one]
            else:
                assert begun.peer is not None
                others = [(begun.peer, Begun(begun.partner, begun.ranks, one))]
            for other, expected in others:
                if heads[other] >= len(queues[other]) or queues[other][heads[other]].count(expected) != times:
                    return None
                open_ranks.append(other)
    return found


def queues_of(world_size: int, work: Callable[[int], object]) -> list[Queue]:
    """The queue of each rank while it runs ``work(rank)``; the ranks are simulated one after another."""
    queues = []
    for rank in range(world_size):
        with as_rank(rank, world_size), recording() as queue:
            work(rank)
        queues.append(queue)
    return queues
