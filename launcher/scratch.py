"""A folder that is needed for a while, on the disk that TMPDIR names."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.refusals import refusals_of


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder, gone when the block ends. Raises OSError, which names TMPDIR, where its disk is full."""
    with tempfile.TemporaryDirectory(prefix="roundtable-") as folder, refusals_of(f"TMPDIR={tempfile.gettempdir()}"):
        yield Path(folder)
