"""gloo's connections between the ranks of a job: all made at once, or, for many ranks, on demand.

By default gloo connects every rank of a group to every other as soon as the group is made, and each rank reads from the
store what every other wrote there for it: bytes that grow with the cube of the number of ranks. On demand, two ranks
connect when they first communicate, and a ring, a tree or a gather to rank 0 needs few connections of almost every
rank.
"""

import os
from collections.abc import MutableMapping

ON_DEMAND = "TORCH_GLOO_LAZY_INIT"  # torch 2.8 and later read it whenever they make a group of gloo
FULL_MESH_RANKS = 64  # up to so many, all connect to all: then each of them sees at once that a rank has died


def connect_on_demand(world_size: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes gloo connect on demand where there are more than 64 ranks, unless the environment says otherwise.

    Call it before the first process group is made.
    """
    if world_size > FULL_MESH_RANKS:
        environment.setdefault(ON_DEMAND, "1")
