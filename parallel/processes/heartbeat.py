"""Connections for heartbeats: every rank keeps one TCP connection to rank 0, and both sides send lines of JSON.

These are used instead of torch's store since a rank that is killed is known at once (its kernel closes the connection),
one that is stopped or whose node is gone falls silent, no call can hang, and a broken connection prints nothing. Once
they are open, no collective is involved. Only one thread may use each end.
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
SEND_SECONDS = 1.0  # a peer that accepts no bytes for this long counts as silent
GOODBYE_SECONDS = 10.0  # for the others to notice that a connection ends; they poll all the time
HELLO_BYTES = 256  # the longest first line, by which a rank names itself
HELLO_SECONDS = 60.0  # for all ranks to connect: they have just completed a collective together


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
        """Sends one line. Errors are ignored here, since reading sees the end of the connection too."""
        with contextlib.suppress(OSError):
            self.connection.sendall(line)

    def read(self) -> list[Message | None]:
        """The messages that have arrived, when the connection is readable; a last None means that it has ended."""
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
    """One rank's connections: rank 0 has a wire to every other rank, the other ranks one to rank 0."""

    def __init__(self, wires: dict[int, Wire]) -> None:
        self.wires = wires
        self.selector = selectors.DefaultSelector()
        for rank, wire in wires.items():
            self.selector.register(wire.connection, selectors.EVENT_READ, rank)
        self.waker, woken = socket.socketpair()
        self.selector.register(woken, selectors.EVENT_READ, None)

    def poll(self, seconds: float) -> list[tuple[int, Message | None]]:
        """The messages that arrived, as (rank, message); None as message where a rank's connection has ended.

        Waits up to ``seconds`` until something arrives or ``wake`` is called.
        """
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
        """Makes ``poll`` return at once. Any thread may call it, also after the polling thread has called ``close``."""
        with contextlib.suppress(OSError):
            self.waker.send(b"!")

    def send(self, message: Message) -> None:
        """Sends a message to rank 0, or from rank 0 to all other ranks."""
        line = encoded(message)
        for wire in self.wires.values():
            wire.send_line(line)

    def drop(self, rank: int) -> None:
        """Closes and removes a rank's connection, after it has ended."""
        wire = self.wires.pop(rank)
        self.selector.unregister(wire.connection)
        wire.connection.close()

    def close(self) -> None:
        """Ends all connections once what was sent has arrived: closing them before would discard it.

        Waits for that at most GOODBYE_SECONDS.
        """
        for wire in self.wires.values():
            with contextlib.suppress(OSError):
                wire.connection.shutdown(socket.SHUT_WR)  # the other side then ends the connection too
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
    """This rank's end of the heartbeats, connected to rank 0 at ``address``. All ranks call it.

    Rank 0 broadcasts its port and a secret over ``mesh.control``. Raises OSError on a rank that cannot connect, and
    TimeoutError on rank 0 where a rank does not connect within a minute.
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
    """A wire to every other rank, by rank. A connection that does not send the token is closed."""
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
    """The first line that a new connection sends, as a dict; empty where there is none or it is no JSON object."""
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
