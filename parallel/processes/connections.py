"""How many connections the processes of a job keep, and when they make them.

gloo connects every rank of a group to every other as soon as the group is made, and each rank reads from the store what
every other wrote there for it: bytes that grow with the cube of the ranks. On demand, two ranks connect when they first
talk to each other, and a ring, a tree or a gathering to rank 0 needs few connections of almost every rank.
"""

import math
import os
from collections.abc import MutableMapping

ON_DEMAND = "TORCH_GLOO_LAZY_INIT"  # torch 2.8 and later read it whenever they make a group of gloo
FULL_MESH_RANKS = 64  # up to so many, all connect to all: then each of them sees at once that a rank has died
WORLD_GROUPS = 2  # of gloo, over all ranks: Mesh.control and the saver's
BYTES_OF_A_PEER = 500  # that a rank exchanges with the store for each peer: 430 with 24 ranks (torch 2.13)
BYTES_OF_A_NUMBER = 8  # that each rank writes for each other where all connect to all, and each other reads


def connect_on_demand(world_size: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Has gloo connect on demand, where ranks are many and nobody has set otherwise. Call before the first group."""
    if world_size > FULL_MESH_RANKS:
        environment.setdefault(ON_DEMAND, "1")


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
    if world_size <= FULL_MESH_RANKS:
        return WORLD_GROUPS * world_size**2 * (BYTES_OF_A_PEER + BYTES_OF_A_NUMBER * world_size)
    return world_size * BYTES_OF_A_PEER * (WORLD_GROUPS * _peers(world_size) + 2)


def _peers(world_size: int) -> int:
    """With how many others a rank talks in one group of all ranks, beside a gathering to rank 0."""
    if world_size <= FULL_MESH_RANKS:
        return world_size - 1
    return 2 * math.ceil(math.log2(world_size))
