"""What a start and a save write into the run directory is on disk before it has its name."""

import os
from pathlib import Path

import pytest

from launcher.config.tree import RunConfig
from launcher.training.newest import read_newest, write_newest
from launcher.training.run_dir import keep_config, saved_config
from launcher.training.run_parts import CONFIG, NEWEST, STARTED_IN


@pytest.fixture
def synced(monkeypatch) -> set[int]:
    """The inodes that were forced to disk."""
    inodes: set[int] = set()
    sync = os.fsync

    def seen(handle: int) -> None:
        sync(handle)
        inodes.add(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", seen)
    return inodes


def test_the_config_of_a_start(tmp_path: Path, synced: set[int]) -> None:
    config = RunConfig(run_dir=str(tmp_path))
    keep_config(config, None)
    assert saved_config(tmp_path) == config
    assert {(tmp_path / name).stat().st_ino for name in (CONFIG, STARTED_IN)} <= synced


def test_the_name_of_the_newest_checkpoint(tmp_path: Path, synced: set[int]) -> None:
    write_newest(tmp_path, "step-00000002", str(tmp_path / "checkpoints"))
    newest = read_newest(tmp_path)
    assert newest is not None and newest.name == "step-00000002"
    assert (tmp_path / NEWEST).stat().st_ino in synced
