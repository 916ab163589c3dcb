"""The heartbeats' wires: every rank keeps one TCP connection to rank 0, and both sides send lines of JSON.

Connections of our own, not torch's store: a rank that is killed is known at once (its kernel closes the connection),
one that is stopped or whose node is gone falls silent, no call can hang, and a broken connection prints nothing.
Nothing here touches a collective once it is open. One thread uses an end.
"""

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import time
from typing import Any

import torch.distributed as dist

from parallel.mesh import Mesh
from parallel.processes.rendezvous import listen_for_ranks

Message = dict[str, Any]
SEND_SECONDS = 1.0  # a peer that takes no bytes for so long is silent
GOODBYE_SECONDS = 10.0  # for the others to notice that a connection ends; they poll all the time
HELLO_BYTES = 256  # of the first line, which says who it is
HELLO_SECONDS = 60.0  # for all ranks to connect: they have just met in a collective


def encoded(message: Message) -> bytes:
    """The message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


class Wire:
    """One connection: JSON lines in both directions."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.connection.settimeout(SEND_SECONDS)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rest = b""

    def send(self, message: Message) -> None:
        """Sends the message as one line."""
        self.send_line(encoded(message))

    def send_line(self, line: bytes) -> None:
        """Sends one line. Errors are left to the reading side, which sees the connection's end too."""
        with contextlib.suppress(OSError):
            self.connection.sendall(line)

    def read(self) -> list[Message | None]:
        """What has arrived, when the connection is readable; None at last where it has ended."""
        try:
            data = self.connection.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        *lines, self.rest = (self.rest + data).split(b"\n")
        ended: list[Message | None] = [] if data else [None]
        return [json.loads(line) for line in lines] + ended


class Heart:
    """One rank's end: rank 0's holds a wire to every other rank, the others' one to rank 0."""

    def __init__(self, wires: dict[int, Wire]) -> None:
        self.wires = wires
        self.selector = selectors.DefaultSelector()
        for rank, wire in wires.items():
            self.selector.register(wire.connection, selectors.EVENT_READ, rank)
        self.waker, woken = socket.socketpair()
        self.selector.register(woken, selectors.EVENT_READ, None)

    def poll(self, seconds: float) -> list[tuple[int, Message | None]]:
        """Waits so long, or until something arrives: (rank, message) each, None where a rank's connection has ended."""
        arrived: list[tuple[int, Message | None]] = []
        for key, _ in self.selector.select(seconds):
            rank: int | None = key.data
            if rank is None:
                key.fileobj.recv(1)  # type: ignore[union-attr]
                continue
            arrived += [(rank, message) for message in self.wires[rank].read()]
            if arrived and arrived[-1] == (rank, None):
                self.drop(rank)
        return arrived

    def wake(self) -> None:
        """Makes ``poll`` return at once; any thread may call it, also when the polling one has closed all meanwhile."""
        with contextlib.suppress(OSError):
            self.waker.send(b"!")

    def send(self, message: Message) -> None:
        """To rank 0; from rank 0, to all."""
        line = encoded(message)
        for wire in self.wires.values():
            wire.send_line(line)

    def drop(self, rank: int) -> None:
        """Forgets a connection that has ended."""
        wire = self.wires.pop(rank)
        self.selector.unregister(wire.connection)
        wire.connection.close()

    def close(self) -> None:
        """Ends all connections, when what was sent has arrived: a close before that would throw it away."""
        for wire in self.wires.values():
            with contextlib.suppress(OSError):
                wire.connection.shutdown(socket.SHUT_WR)  # which the other side answers by its own end
        deadline = time.monotonic() + GOODBYE_SECONDS
        while self.wires and time.monotonic() < deadline:
            self.poll(deadline - time.monotonic())
        for rank in list(self.wires):
            self.drop(rank)
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()
        self.waker.close()


def open_heart(mesh: Mesh, address: str) -> Heart:
    """Connects every rank to rank 0, which all reach at ``address``. All ranks call it.

    Raises OSError on every rank that could not connect, and TimeoutError on rank 0 where one did not within a minute.
    """
    if mesh.world_size == 1:
        return Heart({})
    listener = listen_for_ranks(address) if mesh.rank == 0 else None
    told: list[Any] = [None if listener is None else (listener.getsockname()[1], secrets.token_hex(16))]
    dist.broadcast_object_list(told, src=0, group=mesh.control)
    port, token = told[0]
    if listener is None:
        wire = Wire(socket.create_connection((address, port), timeout=HELLO_SECONDS))
        wire.send({"rank": mesh.rank, "token": token})
        return Heart({0: wire})
    with listener:
        return Heart(_accept_all(listener, mesh.world_size, token))


def _accept_all(listener: socket.socket, world_size: int, token: str) -> dict[int, Wire]:
    """A wire to every other rank; strangers are turned away."""
    deadline = time.monotonic() + HELLO_SECONDS
    wires: dict[int, Wire] = {}
    while len(wires) < world_size - 1:
        listener.settimeout(max(0.1, deadline - time.monotonic()))
        connection, _ = listener.accept()
        wire = Wire(connection)
        hello = _read_line(wire)
        if hmac.compare_digest(str(hello.get("token")).encode(), token.encode()):
            wires[hello["rank"]] = wire
        else:
            connection.close()
    return wires


def _read_line(wire: Wire) -> Message:
    """The first line that a new connection sends; empty where it sends none, or something else."""
    deadline = time.monotonic() + SEND_SECONDS
    data = b""
    with contextlib.suppress(OSError, ValueError):
        while time.monotonic() < deadline and len(data) < HELLO_BYTES and not data.endswith(b"\n"):
            received = wire.connection.recv(1)
            if not received:
                break
            data += received
        message = json.loads(data)
        if isinstance(message, dict):
            return message
    return {}
