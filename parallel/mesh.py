"""Which rank sits where, and the groups through which ranks talk."""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Mesh:
    """This process's place: its rank on each axis, the axes' degrees, and their groups.

    ``control`` is a gloo group over all ranks for objects and small CPU tensors, whatever the device.
    """

    rank: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup | None  # None: one process without a process group

    @property
    def dp(self) -> int:
        """The data-parallel degree."""
        return self.world_size

    @property
    def dp_rank(self) -> int:
        """This process's position on the dp axis."""
        return self.rank


def open_mesh(timeout_seconds: int) -> Mesh:
    """Joins the process group named by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. All ranks call it.

    On CUDA the device is set from LOCAL_RANK before anything else, so that no two ranks share a GPU. DeepSpeed finds the
    group initialized and uses it. A collective that takes longer than ``timeout_seconds`` ends the process.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if cuda else None,
    )
    control = dist.new_group(backend="gloo", timeout=timeout) if cuda else dist.group.WORLD
    assert control is not None
    return Mesh(rank=rank, world_size=world_size, device=device, control=control)


def lone_mesh(device: torch.device) -> Mesh:
    """The mesh of one process that talks to nobody: for evaluation and generation outside a job."""
    return Mesh(rank=0, world_size=1, device=device, control=None)


def close_mesh() -> None:
    """Leaves the process group. All ranks call it, after their last collective."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_over_ranks(values: Tensor, mesh: Mesh) -> Tensor:
    """The sum of a CPU tensor over all ranks, on every rank. All ranks call it; sends 2 (n-1)/n of its bytes a rank."""
    if mesh.control is None:
        return values
    total = values.clone()
    dist.all_reduce(total, group=mesh.control)
    return total
