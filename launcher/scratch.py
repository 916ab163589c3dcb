"""Temporary folders on the disk that TMPDIR names."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.refusals import refusals_of
from parallel.processes.stop import undoing


@contextmanager
def scratch_folder(prefix: str = "roundtable-") -> Iterator[Path]:
    """A new empty folder, removed when the block ends, also by a request to stop.

    Raises OSError, which names TMPDIR, where its disk is full.
    """
    place = f"TMPDIR={tempfile.gettempdir()}"
    with undoing(), tempfile.TemporaryDirectory(prefix=prefix) as folder, refusals_of(place):
        yield Path(folder)
