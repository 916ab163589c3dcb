"""Folders that are there whole or not at all."""

import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from data.partial import partial_suffix
from launcher.errors import UserError
from launcher.new_folder import new_folder


def test_a_folder_is_there_once_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "new/out"
    with new_folder(out) as partial:
        (partial / "file").write_text("content")
        assert not out.exists()
    assert [path.name for path in out.parent.iterdir()] == ["out"] and (out / "file").read_text() == "content"


def test_all_of_it_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch) -> None:
    """A power cut after the renaming leaves no empty file."""
    synced: list[tuple[int, bool]] = []
    sync, out = os.fsync, tmp_path / "out"

    def seen(handle: int) -> None:
        sync(handle)
        synced.append((os.fstat(handle).st_ino, out.exists()))

    monkeypatch.setattr(os, "fsync", seen)
    with new_folder(out) as partial:
        (partial / "folder/below").mkdir(parents=True)
        (partial / "folder/below/file").write_text("content")
        (partial / "file").write_text("content")
        (partial / "link").symlink_to("nowhere")
    paths = [out, *(path for path in out.rglob("*") if not path.is_symlink())]
    assert {path.stat().st_ino for path in paths} <= {inode for inode, is_named in synced if not is_named}


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out") as partial:
        (tmp_path / "out").mkdir()
        (partial / "file").touch()
    assert (tmp_path / "out/file").exists()


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), new_folder(tmp_path / "out") as partial:
        partial.write_text("")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_of_the_same_id_left_is_named(tmp_path: Path) -> None:
    left = tmp_path / f".out.{partial_suffix()}"
    left.mkdir()
    (left / "file").touch()
    with pytest.raises(UserError) as refused, new_folder(tmp_path / "out"):
        raise AssertionError
    assert refused.value.problems == [
        f"{left} must not be there: a killed command has left it, or one of the same process id writes it elsewhere; "
        "remove it"
    ]
    assert (left / "file").exists()


def test_sigterm_leaves_nothing_and_ends_as_a_shell_expects(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, new_folder(tmp_path / "out"):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sent_twice_leaves_nothing(tmp_path: Path, monkeypatch, first: int, second: int) -> None:
    """As `timeout` and Slurm do, to a process and to its group: the second one arrives while the folder is removed."""

    def interrupted(path: Path, **options: bool) -> None:
        os.kill(os.getpid(), second)
        remove(path, **options)

    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)), new_folder(tmp_path / "out"):
            os.kill(os.getpid(), first)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert list(tmp_path.iterdir()) == []


def test_a_thread_makes_one_too(tmp_path: Path) -> None:
    def make() -> None:
        with new_folder(tmp_path / "out"):
            pass

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert (tmp_path / "out").is_dir()
