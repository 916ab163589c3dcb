"""What the operating system refuses names a file, a folder or TMPDIR."""

import errno
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from safetensors import SafetensorError

from data.partial import written_whole
from data.refusals import refusals_of
from launcher.cli import main
from launcher.errors import UserError, why_refused
from launcher.new_folder import new_folder
from launcher.scratch import scratch_folder


def fill() -> None:
    """What a full disk answers to a write, without a name."""
    with Path("/dev/full").open("wb", buffering=0) as file:
        file.write(b"0")


def told(of: OSError) -> str:
    line = why_refused(of)
    assert line is not None
    return line.partition(":")[0]


def test_a_write_to_a_full_disk_names_what_was_to_be_written(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, refusals_of("place"):
        fill()
    assert told(caught.value) == "place"
    with pytest.raises(OSError, match="No space left") as caught, new_folder(tmp_path / "out"):
        fill()
    assert told(caught.value) == str(tmp_path / "out") and list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No space left") as caught, written_whole(tmp_path / "a.json"):
        fill()
    assert told(caught.value) == str(tmp_path / "a.json") and list(tmp_path.iterdir()) == []


def test_of_two_that_make_one_folder_the_second_is_told_so_in_a_line(tmp_path):
    out = tmp_path / "out"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.yaml").write_text("theirs")
    with pytest.raises(UserError, match="must be new, but another process has made it meanwhile"), new_folder(out):
        shutil.copytree(tmp_path / "theirs", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "theirs"]
    assert (out / "config.yaml").read_text() == "theirs"


def test_a_scratch_folder_names_tmpdir_and_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="No space left") as caught, scratch_folder():
        fill()
    assert told(caught.value) == f"TMPDIR={tmp_path}" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_scratch_folder_goes_with_a_command_that_is_asked_to_end(tmp_path, monkeypatch, signum):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.signal(signum, lambda *_: None)
    with pytest.raises(SystemExit) as ended, scratch_folder():
        os.kill(os.getpid(), signum)
    assert ended.value.code == 128 + signum and list(tmp_path.iterdir()) == []
    signal.signal(signum, signal.SIG_IGN)  # as nohup does
    with scratch_folder():
        os.kill(os.getpid(), signum)
    signal.signal(signum, before)


@pytest.mark.parametrize("kind", [Exception, SafetensorError])
def test_libraries_in_rust_are_heard_as_python_is(kind):
    with pytest.raises(OSError, match="No space left") as caught, refusals_of("place"):
        raise kind("No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC and told(caught.value) == "place"


def test_other_errors_stay_as_they_are(tmp_path):
    with pytest.raises(OSError, match="3 bytes came"), refusals_of("place"):
        raise OSError("3 bytes came")
    with pytest.raises(FileNotFoundError) as caught, refusals_of("place"):
        (tmp_path / "none").read_bytes()
    assert caught.value.filename == str(tmp_path / "none")
    with pytest.raises(ValueError, match="no number"), refusals_of("place"):
        raise ValueError("no number")


def test_a_tmpdir_that_is_too_long_for_sockets_is_a_line(tmp_path, monkeypatch, capsys):
    """The fork server listens below it; multiprocessing says "AF_UNIX path too long", and names nothing."""
    folder = tmp_path / ("x" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text("name: small\n")
    assert main(["preflight", "config.yaml", "--ranks", "2"]) == 2
    rule = "may have at most 75 bytes, for the sockets of local processes; give another path"
    assert capsys.readouterr().err == f"TMPDIR={folder}: {rule}\n"
