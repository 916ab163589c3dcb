"""Files that appear atomically: written beside their place under a hidden name with the same suffix, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path to write to, renamed to ``target`` when the block ends, removed where the block fails (also by Ctrl-C).

    with new_file(Path("report.html")) as partial:
        partial.write_text(page)
    """
    partial = target.with_name(f".{target.stem}.partial-{os.getpid()}{target.suffix}")
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
