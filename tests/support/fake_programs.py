"""Writes stand-ins for Slurm's commands as shell scripts, for tests without a cluster."""

from collections.abc import Mapping
from pathlib import Path


def write_programs(folder: Path, texts: Mapping[str, str]) -> None:
    """Writes each program as a shell script with its text into ``folder``, which is created."""
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
