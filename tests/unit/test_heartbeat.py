"""A rank's end of the watchdog's connections, without any other rank."""

import contextlib
import json
import socket
import threading
import time

from parallel.processes.heartbeat import Heart, _accept_all


def test_a_waking_call_ends_the_poll():
    heart = Heart({})
    heart.wake()
    started = time.monotonic()
    assert heart.poll(30) == []
    assert time.monotonic() - started < 15
    heart.close()


def test_a_waking_call_may_come_after_the_end():
    """The thread that polls may see the last word, send it and close before the one that set it wakes it."""
    heart = Heart({})
    heart.close()
    heart.wake()


def test_strangers_are_turned_away():
    """What they send is read no further than a line of ours is long."""
    listener = socket.create_server(("127.0.0.1", 0))
    words = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[" * 5000,
        b'{"rank": 1}\n',
        b'{"rank": 1, "token": "\xc3\xa9"}\n',
        b"[1]\n",
    ]
    words += [b'{"rank": 1, "token": null}\n', b"9" * 5000 + b"\n", b"\xff\n", b"\n"]

    def speak() -> None:
        for word in [*words, json.dumps({"rank": 1, "token": "right"}).encode() + b"\n"]:
            connection = socket.create_connection(listener.getsockname())
            connections.append(connection)
            with contextlib.suppress(OSError):  # it has been turned away already
                connection.sendall(word)
                if not word.endswith(b"\n"):
                    connection.shutdown(socket.SHUT_WR)

    connections: list[socket.socket] = []
    thread = threading.Thread(target=speak)
    thread.start()
    with listener:
        wires = _accept_all(listener, 2, "right")
    thread.join()
    assert list(wires) == [1]
    for connection in connections:
        connection.close()
    wires[1].connection.close()
