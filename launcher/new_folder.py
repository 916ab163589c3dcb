"""Folders that are there whole or not at all: made under a hidden name beside their own, and renamed at the end."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.partial import partial_suffix, sync_folder
from data.refusals import refusals_of
from launcher.errors import UserError
from parallel.processes.stop import undoing


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """The folder to fill, which becomes ``out``, durably, when the block ends, and is gone where it fails.

    SIGTERM and SIGHUP are such failures: a job's end leaves nothing. ``out`` must not be there, or be an empty folder.
    Raises UserError where another process makes it meanwhile, and where one of this id was killed before it was done.
    """
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden = out.with_name(f".{out.name}.{partial_suffix()}")
    with undoing(), refusals_of(out):
        try:
            hidden.mkdir()
        except FileExistsError:  # in a container each process may have the id of the one before
            rule = "must not be there: a killed command has left it, or one of the same process id writes it elsewhere"
            raise UserError([f"{hidden} {rule}; remove it"]) from None
        try:
            yield hidden
            sync_folder(hidden)
            try:
                hidden.rename(out)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                raise UserError(
                    [f"{out} must be new, but another process has made it meanwhile; give another"]
                ) from None
            sync_folder(out.parent)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)  # gone already where the rename was reached
