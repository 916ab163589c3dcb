"""Writing a safetensors file; errors of the operating system are raised as OSError, as for any other file."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from data.refusals import refusals_of


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes contiguous CPU tensors to ``path``. Raises OSError, naming it, where the disk is full, read-only, ..."""
    with refusals_of(path):
        save_file(dict(tensors), path, metadata=metadata)
