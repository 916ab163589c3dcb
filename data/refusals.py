"""What the operating system refuses, by an OSError that names a file."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def refusals_of(place: Path | str) -> Iterator[None]:
    """Has what is refused within the block name ``place`` where it names no file, as a write to a full disk does not.

    Libraries in Rust (safetensors, tokenizers) tell the operating system's number in words alone.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(place)
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(place)) from error
