"""Folders that are there whole or not at all."""

import os
import signal
import threading
from pathlib import Path

import pytest

from launcher.new_folder import new_folder


def test_a_folder_is_there_once_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "new/out"
    with new_folder(out) as partial:
        (partial / "file").write_text("content")
        assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"] and (out / "file").read_text() == "content"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as partial:
        (tmp_path / "out").mkdir()
        (partial / "file").touch()
    assert (tmp_path / "out/file").exists()


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), new_folder(tmp_path / "out") as partial:
        partial.write_text("")
    assert list(tmp_path.iterdir()) == []


def test_sigterm_leaves_nothing_and_ends_as_a_shell_expects(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, new_folder(tmp_path / "out"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGTERM) == before


def test_a_thread_makes_one_too(tmp_path: Path) -> None:
    def make() -> None:
        with new_folder(tmp_path / "out"):
            pass

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert (tmp_path / "out").is_dir()
