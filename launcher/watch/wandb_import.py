"""The ``wandb`` package, imported so that it leaves no temporary folders behind.

Importing it creates two temporary folders for media and artifacts, neither of which Roundtable logs. wandb removes them
when the interpreter exits normally, but a rank's process may be ended without that, or killed. So they are created
within a temporary folder that is removed as soon as the import is done.
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
