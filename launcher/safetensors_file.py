"""Writing a safetensors file, so that a machine that refuses it is heard as for any other file."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes CPU tensors, contiguous, to ``path``. Raises OSError where the disk is full, read-only, gone, ..."""
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:  # the library says the operating system's number in words alone
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
