"""The progress of a proof on stderr: one changing line on a terminal, plain lines elsewhere."""

import threading
import time
from pathlib import Path

from rich.status import Status
from rich.text import Text

from launcher.console import open_console, tell
from launcher.prove.rank import PROGRESS

POLL_SECONDS = 0.2


class ProofProgress:
    """A context manager that shows lines on stderr: those given to ``tell``, and those of rank 0's progress file."""

    def __init__(self, folder: Path) -> None:
        console = open_console(stderr=True)
        self.path = folder / PROGRESS
        self.started = time.monotonic()
        self.status: Status | None = console.status("") if console.is_terminal else None
        self.stopping = threading.Event()
        self.n_told = 0
        self.watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "ProofProgress":
        if self.status is not None:
            self.status.start()
        self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.watcher.join()
        if self.status is not None:
            self.status.stop()

    def tell(self, what: str) -> None:
        """Shows that ``what`` has begun."""
        seconds = time.monotonic() - self.started
        if self.status is not None:
            self.status.update(Text(f"{what} ({seconds:.0f} s)"))
        else:
            tell(f"{seconds:5.1f} s  {what}")

    def _watch(self) -> None:
        while not self.stopping.wait(POLL_SECONDS):
            self._tell_new()
        if self.status is None:  # a plain log has all lines
            self._tell_new()

    def _tell_new(self) -> None:
        if self.path.exists():
            lines = self.path.read_text().splitlines()
            for line in lines[self.n_told :]:
                self.tell(line)
            self.n_told = len(lines)
