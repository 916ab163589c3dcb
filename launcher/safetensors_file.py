"""Writing a safetensors file, so that a machine that refuses it is heard as for any other file."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from data.refusals import refusals_of


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes CPU tensors, contiguous, to ``path``. Raises OSError where the disk is full, read-only, gone, ..."""
    with refusals_of(path):
        save_file(dict(tensors), path, metadata=metadata)
