"""The model in which a send ends only with its receive, and the ring of context parallelism in it."""

import pytest
import torch
import torch.distributed as dist

from parallel.context_parallel.ring import pass_on
from parallel.mesh import Axis
from rendezvous import Begun, Queue, queues_of, stuck

SEND_UP, RECV_UP = Begun("send", (0, 1), 1), Begun("recv", (0, 1), 1)
SEND_DOWN, RECV_DOWN = Begun("send", (0, 1), 0), Begun("recv", (0, 1), 0)
SUM = Begun("allreduce", (0, 1))


@pytest.mark.parametrize(
    ("queues", "ends"),
    [
        ([[(SEND_UP,)], [(RECV_DOWN,)]], True),
        ([[(SEND_UP,), (RECV_UP,)], [(SEND_DOWN,), (RECV_DOWN,)]], False),
        ([[(SEND_UP, RECV_UP)], [(SEND_DOWN, RECV_DOWN)]], True),
        ([[(SEND_UP,)], []], False),
        ([[(SUM,), (SEND_UP,)], [(SUM,), (RECV_DOWN,)]], True),
        ([[(SUM,), (SEND_UP,)], [(RECV_DOWN,), (SUM,)]], False),
        ([[(SUM,)], []], False),
        ([[(SUM,)], [(Begun("broadcast", (0, 1)),)]], False),
        ([[(SEND_UP, SEND_UP)], [(RECV_DOWN,)]], False),
    ],
    ids=[
        "a transfer",
        "both send first",
        "both at once",
        "nobody receives",
        "one order",
        "two orders",
        "a collective on one rank only",
        "two collectives",
        "two sends and one receive",
    ],
)
def test_the_model(queues: list[Queue], ends: bool) -> None:
    assert (stuck(queues) == []) == ends


@pytest.mark.parametrize("cp", [2, 3, 8])
def test_the_ring_ends(cp: int) -> None:
    """Keys go round while gradients of those before follow them."""

    def work(rank: int) -> None:
        axis = Axis(rank, cp, tuple(range(cp)), dist.group.WORLD)
        for step in range(cp):
            if step < cp - 1:
                pass_on(torch.zeros(4), axis, 0)()
            if step > 0:
                pass_on(torch.zeros(4), axis, 1)()

    assert stuck(queues_of(cp, work)) == []
