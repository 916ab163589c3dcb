"""How many connections the processes of a job keep, and when they make them.

gloo connects every rank of a group to every other as soon as the group is made, and each rank reads from the store what
every other wrote there for it: bytes that grow with the cube of the ranks. On demand, two ranks connect when they first
talk to each other, and a ring, a tree or a gathering to rank 0 needs few connections of almost every rank.
"""

import os
from collections.abc import MutableMapping

ON_DEMAND = "TORCH_GLOO_LAZY_INIT"  # torch 2.8 and later read it whenever they make a group of gloo
FULL_MESH_RANKS = 64  # up to so many, all connect to all: then each of them sees at once that a rank has died


def connect_on_demand(world_size: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Has gloo connect on demand, where ranks are many and nobody has set otherwise. Call before the first group."""
    if world_size > FULL_MESH_RANKS:
        environment.setdefault(ON_DEMAND, "1")
