"""Files that take their place in one act: written beside it, under a hidden name that ends as theirs does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """Where to write what becomes ``target`` when the block ends; gone where the block fails, by Ctrl-C too.

    with new_file(Path("report.html")) as partial:
        partial.write_text(page)
    """
    partial = target.with_name(f".{target.stem}.partial-{os.getpid()}{target.suffix}")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
