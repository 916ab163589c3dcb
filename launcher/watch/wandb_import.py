"""The ``wandb`` package, imported so that it leaves nothing behind.

Importing it makes two temporary folders, for media and artifacts, of which we log none. They are removed when the
interpreter ends, but a rank's process is ended without that, or killed. So they are made where they go at once.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _no_folders_left() -> Iterator[None]:
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="wandb-import-") as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


with _no_folders_left():
    import wandb as wandb
    from wandb.proto.wandb_internal_pb2 import (
        Record as Record,  # pyright: ignore[reportAttributeAccessIssue] - made at run time
    )
