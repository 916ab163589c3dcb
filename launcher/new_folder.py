"""Folders that appear complete or not at all: filled under a hidden name beside their place, and renamed at the end."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.partial import partial_suffix, sync_all, sync_folder
from data.refusals import refusals_of
from launcher.errors import UserError
from parallel.processes.stop import undoing


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A new folder to fill, synced and renamed to ``out`` when the block ends, and removed where the block fails.

    SIGTERM, SIGUSR1 and SIGHUP count as failures, so that a job that is ended leaves nothing behind. ``out`` must not
    exist, or be an empty folder. Raises UserError where another process has made ``out`` meanwhile, and where a killed
    process of the same id has left its hidden folder.
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
            sync_all(hidden)
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
