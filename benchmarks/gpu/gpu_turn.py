"""Turns in what is timed, of parts that run side by side on one GPU: who has its turn has the GPU alone.

Parts take turns that are started with one file's path in GPU_TURN. Each worker of `hour.py` and all that it starts have
a GPU_OWNER of their own. Imports no torch.
"""

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator

TURN, OWNER = "GPU_TURN", "GPU_OWNER"


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Around what is timed: the other parts' processes are stopped until its end. Without GPU_TURN nothing happens."""
    owner = os.environ.get(OWNER)
    with contextlib.ExitStack() as held:
        if (path := os.environ.get(TURN)) is not None:
            fcntl.flock(held.enter_context(open(path, "a")), fcntl.LOCK_EX)
            held.callback(send_others, path, signal.SIGCONT, owner)
            send_others(path, signal.SIGSTOP, owner)
        yield


def wake_others(owner: str) -> None:
    """Once all that this owner started has been killed, which may have been in its turn: nobody stays stopped."""
    if (path := os.environ.get(TURN)) is not None:
        with open(path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            send_others(path, signal.SIGCONT, owner)


def send_others(path: str, number: signal.Signals, owner: str | None) -> None:
    """A signal to all processes that take turns by this file and have another owner."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            variables = process.environ()
            if variables.get(TURN) == path and variables.get(OWNER, owner) != owner:
                process.send_signal(number)
