"""Turning the operating system's errors into an OSError that names a file."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def refusals_of(place: Path | str) -> Iterator[None]:
    """A context in which an OSError without a file name, such as that of a full disk, gets the name ``place``.

    Errors of libraries in Rust (safetensors, tokenizers), which give the system's error number only in their text, are
    turned into an OSError too.
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
