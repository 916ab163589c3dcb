"""Counts the sockets of a job's processes and the bytes over rank 0's store, in real gloo groups."""

import math
import os
import socket
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from launcher.config.tree import RunConfig
from parallel.checkpoint.saver import open_group
from parallel.mesh import Mesh, close_mesh, lone_mesh, open_mesh
from parallel.processes import connections
from parallel.processes.device import own_device
from parallel.processes.environment import number
from parallel.processes.heartbeat import open_heart
from parallel.processes.rendezvous import store_of_next_group
from parallel.processes.waits import Waits

SECONDS = 120
WORLD_GROUPS = 2  # of gloo, over all ranks: Mesh.control and the saver's
BYTES_OF_A_PEER = 500  # bytes that a rank exchanges with the store for each peer: 430 with 24 ranks (torch 2.13)
BYTES_OF_A_NUMBER = 8  # bytes that each rank writes for each other, and each other reads, where all connect to all


@dataclass
class Counts:
    """The counts of one rank, and the limits that they are compared with."""

    sockets: int
    told: int  # the limit by ``most_connections``
    bytes_of_groups: int  # over the store while both groups were made and used; of all ranks together
    bytes_told: int  # the limit by ``store_bytes``


def count_connections(folder: str, on_demand: bool) -> Counts:
    """Joins the job as ``open_mesh`` does, with the saver's group and the watchdog's connections, and counts.

    All ranks call it; each group and kind of collective is used once before counting. ``folder`` is shared by the
    ranks. ``on_demand``: connections are opened on demand even between few ranks.
    """
    if on_demand:
        connections.FULL_MESH_RANKS = 1
    rank, world_size = number("RANK"), number("WORLD_SIZE")
    before = open_sockets()
    store = through_proxy(Path(folder), rank, world_size)
    connections.connect_on_demand(world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    control = dist.group.WORLD
    assert isinstance(control, dist.ProcessGroup)
    savers = open_group(SECONDS)
    use(control, world_size)
    use(savers, world_size)
    dist.gather_object(rank, [None] * world_size if rank == 0 else None, dst=0, group=savers)
    mesh: Mesh = replace(lone_mesh(own_device()), rank=rank, world_size=world_size, control=control)
    heart = open_heart(mesh, os.environ["MASTER_ADDR"])
    dist.barrier()
    found = open_sockets() - before - (2 * world_size - 1 if rank == 0 else 0)  # less the proxy's own
    dist.barrier()
    bytes_of_groups = _bytes[0]
    dist.barrier()
    heart.close()
    close_mesh()
    told = most_connections(world_size, is_first=rank == 0)
    return Counts(found, told, bytes_of_groups, store_bytes(world_size))


def most_connections(world_size: int, *, is_first: bool) -> int:
    """The most sockets that a process of a job has: of the store, the watchdog, and the two groups of all ranks.

    Rank 0 hosts the store, hears every rank's watchdog, and gathers what all ranks have saved. The others have the
    neighbours of a ring and of two trees, which lie at distances of powers of two.
    """
    others = world_size - 1
    of_store = 1 + (1 + world_size if is_first else 0)
    of_watchdog = 2 + (others if is_first else 1)
    of_gathering = others if is_first else 1
    return of_store + of_watchdog + of_gathering + WORLD_GROUPS * (1 + _peers(world_size))


def store_bytes(world_size: int) -> int:
    """The most bytes that both groups of all ranks read from rank 0's store and write there, all ranks together."""
    if world_size <= connections.FULL_MESH_RANKS:
        return WORLD_GROUPS * world_size**2 * (BYTES_OF_A_PEER + BYTES_OF_A_NUMBER * world_size)
    return world_size * BYTES_OF_A_PEER * (WORLD_GROUPS * _peers(world_size) + 2)


def _peers(world_size: int) -> int:
    """The number of other ranks that a rank talks to in one group of all ranks, besides a gather to rank 0."""
    if world_size <= connections.FULL_MESH_RANKS:
        return world_size - 1
    return 2 * math.ceil(math.log2(world_size))


def use(group: dist.ProcessGroup, world_size: int) -> None:
    """Runs each kind of collective that a job runs over these groups."""
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, dist.get_rank(), group=group)
    dist.broadcast_object_list([everyone], src=0, group=group)
    dist.barrier(group=group)


def open_sockets() -> int:
    """The number of sockets that this process has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
        except FileNotFoundError:  # the descriptor of the listing itself, closed since
            continue
    return found


_bytes: list[int] = [0]


def through_proxy(folder: Path, rank: int, world_size: int) -> Any:
    """The job's store; ranks other than 0 reach it through a proxy in rank 0 that counts their bytes."""
    port = folder / "port"
    if rank == 0:
        store = store_of_next_group(SECONDS)
        proxy = socket.create_server((os.environ["MASTER_ADDR"], 0), backlog=world_size)
        threading.Thread(target=_accept, args=(proxy, world_size - 1), daemon=True).start()
        (folder / "port.partial").write_text(str(proxy.getsockname()[1]))
        (folder / "port.partial").rename(port)
        return store
    while not port.exists():
        threading.Event().wait(0.01)
    os.environ["MASTER_PORT"] = port.read_text()
    return store_of_next_group(SECONDS)


def _accept(proxy: socket.socket, n_ranks: int) -> None:
    target = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    for _ in range(n_ranks):
        near, _address = proxy.accept()
        far = socket.create_connection(target)
        for ends in ((near, far), (far, near)):
            ends[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            _bytes[0] += len(data)
            sink.sendall(data)
    except OSError:
        pass


def collectives_of_a_step(config: RunConfig, over_control: bool) -> dict[str, int]:
    """The number of collectives in the second step that run over the control group, and of all others.

    As on CUDA, the control group is a gloo group of its own. ``over_control`` plants a fault: sums over ranks go over
    that group.
    """
    from data.dataset import open_dataset
    from launcher.training.loop import build_engine, run_step
    from launcher.training.state import TrainState

    mesh = open_mesh(config.parallel, SECONDS)
    mesh = replace(mesh, control=dist.new_group(backend="gloo"))
    assert mesh.control is not None
    if over_control:
        plant_control(mesh.control)
    engine = build_engine(config, mesh)
    engine.initialize_weights(0)
    dataset = open_dataset(config.data, seed=0, vocab_size=config.model.vocab_size, split="train")
    state, waits = TrainState(), Waits()
    run_step(config, engine, dataset, state)
    waits.install()
    run_step(config, engine, dataset, state)
    waits.remove()
    close_mesh()
    control = waits.counts.pop(mesh.control.group_name, 0)
    return {"control": control, "other": sum(waits.counts.values())}


def plant_control(group: dist.ProcessGroup) -> None:
    """Plants the fault that sums over ranks go over ``group``."""
    import launcher.training.step as step

    def over_control(values: Tensor, mesh: Mesh) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    step.sum_over_ranks = over_control
