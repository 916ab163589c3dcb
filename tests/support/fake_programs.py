"""Programs of Slurm's that are shell scripts here, for what is known without a cluster."""

from collections.abc import Mapping
from pathlib import Path


def write_programs(folder: Path, texts: Mapping[str, str]) -> None:
    """Each program as a script of its text, in ``folder``, which is made."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
