"""A process as one rank of a world that does not exist, with a mesh whose process groups move nothing."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from parallel.config import ParallelConfig
from parallel.mesh import AXES, Axis, Degrees, Mesh, lone_mesh


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process a rank of a world whose collectives move nothing, while the context lasts."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def deterministic(is_asked_for: bool) -> Iterator[None]:
    """Sets torch's switch for deterministic algorithms, by which kernels are chosen, while the context lasts."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(is_asked_for)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def mesh_of(parallel: ParallelConfig, world_size: int, rank: int, device: torch.device) -> Mesh:
    """The rank's mesh. To be called within ``as_rank``, unless the rank is alone and needs no groups."""
    if world_size == 1 and not dist.is_initialized():
        return lone_mesh(device)
    degrees, axes, groups = Degrees.of(parallel, world_size), {}, {}
    for name in AXES:
        line = next(line for line in degrees.lines(name) if rank in line)
        if line not in groups:
            groups[line] = dist.new_group(list(line))
        axes[name] = Axis(line.index(rank), len(line), line, groups[line])
    return Mesh(rank=rank, world_size=world_size, device=device, control=None, neighbours={}, **axes)
