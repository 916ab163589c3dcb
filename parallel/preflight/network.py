"""The preflight's check of the network: bus bandwidths of all-reduce and all-to-all, and which nodes are paired.

Bus bandwidth is that of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), which can be compared with the
hardware's stated bandwidth for any number n of ranks: S/t x 2(n-1)/n for an all-reduce, S/t x (n-1)/n for an
all-to-all, where S is the size in bytes of each rank's input, and t the time.
"""

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage] -- documented, but not in torch's __all__
    Store,  # pyright: ignore[reportPrivateImportUsage]
)

from parallel.preflight.device import Sizes, seconds_of
from parallel.processes.device import choose_interface

PARTNERS = 3  # nodes with which each is paired: even with two bad ones among them, one pair shows its own speed


def meet(
    store: Store, name: str, members: Sequence[int], rank: int, device: torch.device, sizes: Sizes, limit_seconds: float
) -> tuple[float, float]:
    """The bus bandwidths in GB/s of an all-reduce and of an all-to-all among ``members``, as this rank measured them.

    All members, of which there are at least two, call it, while no process group is open. Raises RuntimeError where a
    member does not call it, or a collective fails, takes longer than the limit, or gives a wrong result.
    """
    with _group(store, name, members, rank, device, limit_seconds):
        return _all_reduce(len(members), device, sizes), _all_to_all(len(members), device, sizes)


@contextmanager
def _group(
    store: Store, name: str, members: Sequence[int], rank: int, device: torch.device, limit_seconds: float
) -> Iterator[None]:
    """While entered, the default process group is one of the members alone, so that no other rank can delay them."""
    place = PrefixStore(f"meeting/{name}", store)
    limit = datetime.timedelta(seconds=limit_seconds)
    place.set(f"here/{rank}", "")
    # NCCL's call that opens a communicator waits for the others without a limit, so it begins when all are here.
    place.wait([f"here/{member}" for member in members], limit)
    cuda = device.type == "cuda"
    choose_interface()
    # A wait that is over time raises here, instead of ending the process from NCCL's watchdog. Only a
    # collective with ``async_op`` has a Work to wait for; after any other one the host waits for the device, without
    # a limit.
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=place,
        rank=list(members).index(rank),
        world_size=len(members),
        timeout=limit,
        device_id=device if cuda else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _all_reduce(n: int, device: torch.device, sizes: Sizes) -> float:
    values = torch.ones(sizes.message_bytes // 4, device=device)
    _end(dist.all_reduce(values, async_op=True))
    if not bool((values == n).all()):
        raise RuntimeError("an all-reduce gave a wrong sum")
    values.zero_()  # zeros stay zeros however often they are summed
    seconds = [seconds_of(lambda: dist.all_reduce(values), 1, device) for _ in range(sizes.repeats)]
    return sizes.message_bytes / min(seconds) * 2 * (n - 1) / n / 1e9


def _all_to_all(n: int, device: torch.device, sizes: Sizes) -> float:
    part = sizes.message_bytes // 4 // n
    sent = torch.full((part * n,), float(dist.get_rank()), device=device)
    received = torch.empty_like(sent)
    _end(dist.all_to_all_single(received, sent, async_op=True))
    if not torch.equal(received.view(n, part), torch.arange(float(n), device=device)[:, None].expand(n, part)):
        raise RuntimeError("an all-to-all gave wrong rows")
    seconds = [seconds_of(lambda: dist.all_to_all_single(received, sent), 1, device) for _ in range(sizes.repeats)]
    return 4 * part * n / min(seconds) * (n - 1) / n / 1e9


def _end(work: dist.Work | None) -> None:
    """Waits for a collective. Raises RuntimeError where it takes longer than the group's limit."""
    assert work is not None
    work.wait()


def schedule(nodes: Sequence[str], most: int = PARTNERS) -> list[list[tuple[str, str]]]:
    """At most ``most`` rounds of pairs of nodes: no node comes twice in a round, and no pair twice in all.

    By the circle method of tournaments: one seat stays, the others move on. With an odd number of nodes, another node
    has no partner in each round.
    """
    seats: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    rounds = []
    for _ in range(min(most, len(seats) - 1)):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(a, b) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds
