"""A file that cannot be written is an OSError, as for every other file."""

import errno
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launcher.safetensors_file import save_tensors

TENSORS = {"a": torch.arange(100_000, dtype=torch.float32)}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        save_tensors(TENSORS, tmp_path / "gone" / "file")
    assert caught.value.filename == str(tmp_path / "gone" / "file")


def test_a_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"this machine mounts no small file system: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
            save_tensors(TENSORS, tmp_path / "file")
        assert caught.value.errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_what_was_written(tmp_path: Path) -> None:
    save_tensors(TENSORS, tmp_path / "file")
    assert torch.equal(load_file(tmp_path / "file")["a"], TENSORS["a"])
