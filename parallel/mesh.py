"""The mesh: each rank's position on the axes of parallelism, and the process groups along them.

    world = pp x dp x cp x tp      tp varies fastest: rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank

For experts the same dp x cp x tp ranks of a stage are divided another way: ep consecutive ranks hold all experts once,
and edp = dp * cp * tp / ep ranks hold the same experts (each expert has edp replicas).
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _process_group_color

from parallel.config import ParallelConfig
from parallel.processes.connections import connect_on_demand
from parallel.processes.device import choose_interface, own_device
from parallel.processes.environment import number
from parallel.processes.rendezvous import store_of_next_group


@dataclass(frozen=True)
class Axis:
    """One axis as this process sees it: its position, the degree, and the ranks along it (global numbers, in order)."""

    rank: int
    degree: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None  # None: one process without a process group


@dataclass(frozen=True)
class Mesh:
    """This process's rank, its device, and its position on every axis, with the axes' process groups.

    ``control`` is a gloo group over all ranks, for objects and small CPU tensors. The device's own group over all ranks
    (NCCL on CUDA) is torch's default group.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None  # None: one process without a process group
    tp: Axis
    cp: Axis
    dp: Axis
    pp: Axis
    ep: Axis
    edp: Axis  # the ranks that hold the same experts
    replicas: Axis  # dp x cp: the ranks that hold the same dense weights
    model: Axis  # pp x tp: what DeepSpeed calls model parallel
    # neighbour on pp (global rank) -> a group of the two; empty where pp has fewer than three ranks
    neighbours: Mapping[int, dist.ProcessGroup]

    @property
    def place(self) -> str:
        """The rank's positions on the axes of degree above one, for messages: "rank 3 (pp 1, tp 1)"."""
        return _place(self.rank, {name: (getattr(self, name).rank, getattr(self, name).degree) for name in SHOWN_AXES})


SHOWN_AXES = ("pp", "dp", "cp", "tp", "ep")  # the axes whose positions name a rank in messages


def _place(rank: int, axes: dict[str, tuple[int, int]]) -> str:
    """A rank with its positions: axes are name -> (position, degree)."""
    inside = ", ".join(f"{name} {position}" for name, (position, degree) in axes.items() if degree > 1)
    return f"rank {rank} ({inside})" if inside else f"rank {rank}"


@dataclass(frozen=True)
class Degrees:
    """The degrees of all axes for a number of processes; dp is what the other axes leave."""

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> "Degrees":
        """The degrees that a config gives ``world_size`` processes."""
        names = ("tp", "cp", "pp", "ep")
        return cls(world_size, **{name: getattr(parallel, name, 1) for name in names})

    @property
    def dp(self) -> int:
        """The data-parallel degree."""
        return self.world_size // (self.tp * self.cp * self.pp)

    @property
    def stage(self) -> int:
        """The number of ranks of one pipeline stage."""
        return self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """The number of ranks that hold the same experts."""
        return self.stage // self.ep

    def places(self) -> list[str]:
        """Each rank's name in messages, such as "rank 3 (pp 1, tp 1)", by rank."""
        found: list[dict[str, tuple[int, int]]] = [{} for _ in range(self.world_size)]
        for name in SHOWN_AXES:
            for line in self.lines(name):
                for position, rank in enumerate(line):
                    found[rank][name] = (position, len(line))
        return [_place(rank, axes) for rank, axes in enumerate(found)]

    def stages(self) -> list[list[int]]:
        """The ranks of each pipeline stage."""
        return [list(range(first, first + self.stage)) for first in range(0, self.world_size, self.stage)]

    def lines(self, axis: str) -> list[tuple[int, ...]]:
        """The ranks along ``axis``, for every line of the mesh parallel to it: a partition of the world."""
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            lines.setdefault(self.elsewhere(axis, rank), []).append(rank)
        return [tuple(line) for line in lines.values()]

    def elsewhere(self, axis: str, rank: int) -> tuple[int, ...]:
        """The rank's coordinates that are the same for all ranks of its line along ``axis``."""
        tp = rank % self.tp
        cp = rank // self.tp % self.cp
        dp = rank // (self.tp * self.cp) % self.dp
        pp, within = divmod(rank, self.stage)
        match axis:
            case "tp":
                return (pp, dp, cp)
            case "cp":
                return (pp, dp, tp)
            case "dp":
                return (pp, cp, tp)
            case "pp":
                return (dp, cp, tp)
            case "ep":
                return (pp, within // self.ep)
            case "edp":
                return (pp, within % self.ep)
            case "replicas":
                return (pp, tp)
            case "model":
                return (dp, cp)
            case _:
                raise AssertionError(axis)


AXES = ("tp", "cp", "dp", "pp", "ep", "edp", "replicas", "model")
# Axes that never share a group with another axis of the same ranks. NCCL executes the calls of one group in order, so
# in a shared group the experts' all-to-all would wait for sums of gradients, and a shared expert's gather for the
# all-to-all that it is to overlap.
APART = ("tp", "cp", "ep")


def open_mesh(parallel: ParallelConfig, timeout_seconds: int, nccl_seconds: int | None = None) -> Mesh:
    """Joins the process group named by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. All ranks call it.

    On CUDA the rank's own device is set before anything else, so that no two ranks share a GPU. DeepSpeed finds the
    group initialized and uses it. A collective that takes longer than ``timeout_seconds`` ends the process. NCCL does
    so by SIGABRT; ``nccl_seconds``, if given, is its limit instead, so that a watchdog that reports more can act first.
    """
    rank, world_size = number("RANK"), number("WORLD_SIZE")
    device = own_device()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    choose_interface()
    connect_on_demand(world_size)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = store_of_next_group(timeout_seconds)
    store.set_timeout(timeout)
    of_devices = datetime.timedelta(seconds=nccl_seconds) if cuda and nccl_seconds is not None else timeout
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=of_devices,
        device_id=device if cuda else None,
        store=store,
    )
    control = dist.new_group(backend="gloo", timeout=timeout) if cuda else dist.group.WORLD
    assert not isinstance(control, int)
    degrees = Degrees.of(parallel, world_size)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    axes: dict[str, Axis] = {}
    for name in AXES:
        lines = degrees.lines(name)
        is_apart = name in APART and len(lines[0]) > 1
        axes[name] = _open_axis(lines, rank, {} if is_apart else groups, of_devices)
    neighbours = _open_neighbours(degrees, rank, of_devices)
    return Mesh(rank=rank, world_size=world_size, device=device, control=control, neighbours=neighbours, **axes)


def pairings(n: int) -> list[list[tuple[int, int]]]:
    """All pairs of neighbours on a ring of ``n`` positions, in rounds, each position once at most; none below three."""
    if n < 3:
        return []
    pairs, around = [(position, position + 1) for position in range(n - 1)], (0, n - 1)
    return [pairs[::2], pairs[1::2], [around]] if n % 2 else [pairs[::2], [*pairs[1::2], around]]


def neighbours_lines(degrees: Degrees) -> list[list[tuple[int, ...]]]:
    """For each round of ``pairings`` on pp, a partition of all ranks: pairs of neighbours, and other ranks alone."""
    lines, found = degrees.lines("pp"), []
    for pairs in pairings(degrees.pp):
        together = [(line[one], line[other]) for line in lines for one, other in pairs]
        alone = set(range(degrees.world_size)).difference(*together)
        found.append([*together, *((rank,) for rank in sorted(alone))])
    return found


def _open_neighbours(degrees: Degrees, rank: int, timeout: datetime.timedelta) -> dict[int, dist.ProcessGroup]:
    """The groups of ``Mesh.neighbours``. All ranks must call it.

    A rank without a partner in a round makes a group of itself alone, so that all ranks make equally many groups: torch
    names a group by its ranks and by the number of groups that the rank has, and all ranks take part in each split of
    NCCL's communicator.
    """
    opened = [_open_axis(lines, rank, {}, timeout) for lines in neighbours_lines(degrees)]
    return {other: axis.group for axis in opened for other in axis.ranks if other != rank and axis.group is not None}


def _open_axis(
    lines: Sequence[tuple[int, ...]],
    rank: int,
    groups: dict[tuple[int, ...], dist.ProcessGroup],
    timeout: datetime.timedelta,
) -> Axis:
    """This rank's line along one axis, with its group. Only the line's own ranks create the group.

    ``groups`` holds the groups made so far that may be shared, by their ranks: an axis with the same line takes that
    group.
    """
    mine = next(line for line in lines if rank in line)
    if mine not in groups:
        with _split_if_told_apart(lines) as device:
            group = dist.new_group(list(mine), timeout=timeout, use_local_synchronization=True, device_id=device)
        assert isinstance(group, dist.ProcessGroup)
        groups[mine] = group
    return Axis(mine.index(rank), len(mine), mine, groups[mine])


@contextmanager
def _split_if_told_apart(lines: Sequence[tuple[int, ...]]) -> Iterator[torch.device | None]:
    """While entered, new groups are split off the default group only where NCCL can tell all ``lines`` apart.

    A split takes ranks of one colour as one group, and torch's colours are 31-bit hashes of the ranks: of 16,384 lines
    two share a colour with a probability of 6%, and would become one communicator. The ranks of groups that are not
    split off find each other through the store instead, which takes longer. All ranks come to the same answer.

    It yields the device to which the new group is to be bound, None on a CPU. Without a bound device torch makes one
    communicator in the group's first batch of transfers and another in its first transfer that is begun alone. In
    torch 2.13 one rank of a pipeline batches a send with a receive while the other rank begins the matching send
    alone: on two communicators they would never meet.
    """
    default = dist.group.WORLD
    assert default is not None
    bound = default.bound_device_id
    if bound is not None and len({_process_group_color(list(line)) for line in lines}) < len(lines):
        default.bound_device_id = None
    try:
        yield bound
    finally:
        default.bound_device_id = bound


def lone_mesh(device: torch.device) -> Mesh:
    """The mesh of one process without process groups, for evaluation and generation outside a distributed job."""
    alone = {name: Axis(0, 1, (0,), None) for name in AXES}
    return Mesh(rank=0, world_size=1, device=device, control=None, neighbours={}, **alone)


def close_mesh() -> None:
    """Leaves the process group. All ranks call it, after their last collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def opened_mesh(parallel: ParallelConfig, timeout_seconds: int) -> Iterator[Mesh]:
    """The mesh as a context manager; all ranks enter and leave it together.

    A rank that raises does not close its groups, which last until the process ends: closing an NCCL group waits for the
    collectives that were started there, and so for ranks that wait for this one.
    """
    yield open_mesh(parallel, timeout_seconds)
    close_mesh()


def wait_for_all(mesh: Mesh) -> None:
    """Returns when every rank has called it (a barrier of gloo). All ranks call it."""
    if mesh.control is not None:
        dist.barrier(group=mesh.control)


def sum_over_ranks(values: Tensor, mesh: Mesh) -> Tensor:
    """The sum of a small tensor over all ranks, on every rank's device. All ranks call it.

    Before: a summand of the same shape on each rank, on any device. After: the same sum on all; ``values`` is
    unchanged. It goes over the devices' own group: NCCL's trees take a number of hops that grows with the logarithm of
    the ranks, gloo's ring 2 (n - 1) of them, one after another. Each of n ranks sends 2 (n-1)/n of the tensor's bytes.
    """
    total = values.to(mesh.device, copy=True)
    if mesh.control is not None:
        dist.all_reduce(total)
    return total


def max_over_ranks(values: Tensor, mesh: Mesh) -> Tensor:
    """The elementwise maximum of a small tensor over all ranks, on every rank's device. All ranks call it.

    Before: a tensor of the same shape on each rank, on any device. After: the same maxima on all; ``values`` is
    unchanged. It goes over the devices' own group. Each of n ranks sends 2 (n-1)/n of the tensor's bytes.
    """
    largest = values.to(mesh.device, copy=True)
    if mesh.control is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest
