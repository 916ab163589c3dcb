"""A shard's file: what is written is what was given, past the page cache where that can be, through it where not.

And a commit: what it names is on disk before it has the name.
"""

import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.checkpoint.local import BLOCK_BYTES, SMALLEST_DIRECT, LocalFolder, LocalOutput, LocalStore
from parallel.checkpoint.safetensors_stream import encode_header, write_hashed
from parallel.checkpoint.saver import host_buffer

LARGE = SMALLEST_DIRECT + 3 * BLOCK_BYTES


@pytest.fixture(scope="module")
def memory():
    """Random bytes that begin at a block's boundary."""
    pages = memoryview(mmap.mmap(-1, 8 * LARGE))
    pages[:] = os.urandom(len(pages))
    return pages


def ways_of(chunks, path) -> list[bool]:
    """For each chunk, written in turn, whether it went past the page cache (its first blocks at least)."""
    ways = []
    with LocalOutput(path) as out:
        write = os.write

        def seen(handle, view):
            ways.append(bool(fcntl.fcntl(handle, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0)))
            return write(handle, view)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "write", seen)
            for chunk in chunks:
                out.write(chunk)
    return ways


ASKED_AT_A_LOCK = """\
import signal, sys, threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from parallel.checkpoint.local import LocalFolder
from parallel.checkpoint.safetensors_stream import write_hashed

def raise_exit(signum, _):
    raise SystemExit(128 + signum)

def enter(condition):
    global is_asked
    got = take(condition)
    if is_asked and threading.get_ident() == main:
        is_asked = False
        signal.raise_signal(signal.SIGTERM)
    return got

def chunks():
    global is_asked
    for number in range(8):
        is_asked |= number == 3
        yield memoryview(bytes(1 << 24))
    signal.raise_signal(signal.SIGTERM)  # no lock of Python's was taken

is_asked, main, take = False, threading.get_ident(), threading.Condition.__enter__
threading.Condition.__enter__ = enter
signal.signal(signal.SIGTERM, raise_exit)
write_hashed(LocalFolder(Path(sys.argv[1])), "shard", chunks())
"""


def test_asked_to_end_while_a_lock_is_taken(tmp_path):
    """What a handler raised there left a future's lock taken, and the thread that writes waited for it for ever."""
    (tmp_path / "work.py").write_text(ASKED_AT_A_LOCK)
    command = [sys.executable, str(tmp_path / "work.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


class Refusing:
    """A file for which there is no room after the first chunk."""

    def __init__(self):
        self.written = b""

    def create(self, file):
        return self

    def write(self, data):
        if self.written:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written += data

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("n_chunks", [2, 3, 9])
def test_a_chunk_that_cannot_be_written(n_chunks):
    """The last one, which nothing follows, or any before it."""
    refusing: Any = Refusing()
    with pytest.raises(OSError, match="No space left"):
        write_hashed(refusing, "shard", [b"chunk"] * n_chunks)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2 * LARGE)), max_size=5))
def test_any_chunks(memory, tmp_path_factory, cuts):
    path = tmp_path_factory.mktemp("output") / "shard"
    chunks = [memory[start : start + size] for start, size in cuts]
    with LocalOutput(path) as out:
        for chunk in chunks:
            out.write(chunk)
    assert path.read_bytes() == b"".join(chunks)


@pytest.mark.parametrize("n_pieces", [0, 1, 7, 200])
def test_a_shards_data_begins_at_a_block(n_pieces):
    header = encode_header({f"weight/layers.{number}.w": (number, 3) for number in range(n_pieces)})
    assert len(header) % BLOCK_BYTES == 0


def test_large_blocks_go_past_the_page_cache(memory, tmp_path):
    chunks = [b" " * BLOCK_BYTES, memory[:LARGE], memory[: LARGE + 1], memory[:LARGE]]
    ways = ways_of(chunks, tmp_path / "shard")
    if not any(ways):
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    assert ways == [False, True, True, False, False]  # a byte too many: from there on nothing begins at a block
    assert (tmp_path / "shard").read_bytes() == b"".join(chunks)


def test_a_file_system_that_refuses_late(memory, tmp_path, monkeypatch):
    write = os.write

    def refuses(handle, view):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(handle, view)

    monkeypatch.setattr(os, "write", refuses)
    with LocalOutput(tmp_path / "shard") as out:
        out.write(memory[:LARGE])
        out.write(memory[:LARGE])
    assert (tmp_path / "shard").read_bytes() == bytes(memory[:LARGE]) * 2


def test_a_system_without_direct_writes_and_hints(memory, tmp_path, monkeypatch):
    """As macOS is."""
    for name in ("O_DIRECT", "posix_fadvise", "POSIX_FADV_WILLNEED"):
        monkeypatch.delattr(os, name, raising=False)
    folder = LocalFolder(tmp_path)
    with folder.create("shard") as out:
        out.write(memory[:LARGE])
    buffer = bytearray(LARGE)
    with folder.open("shard") as content:
        assert content.readinto(buffer) == LARGE
    assert buffer == memory[:LARGE]


def test_what_a_commit_names_is_on_disk_before(tmp_path, monkeypatch):
    happened: list[int | str] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (happened.append(os.fstat(handle).st_ino), fsync(handle)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (happened.append("renamed"), rename(path, to)))
    store = LocalStore(tmp_path)
    folder, _ = store.begin("step-00000001", "0-1")
    for file in ("shard", "tokenizer/tokenizer.json"):
        with folder.create(file) as out:
            out.write(b"content")
    store.commit("step-00000001", "0-1", b"{}")
    committed = tmp_path / "step-00000001"
    files = [committed / name for name in ("", "shard", "tokenizer", "tokenizer/tokenizer.json", "manifest.json")]
    at = happened.index("renamed")
    assert {path.stat().st_ino for path in files} <= set(happened[:at])
    assert happened[at + 1 :] == [tmp_path.stat().st_ino]


def test_a_full_disk_is_told(memory, tmp_path, monkeypatch):
    def full(handle, view):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"), LocalOutput(tmp_path / "shard") as out:
        out.write(memory[:LARGE])


def test_the_savers_buffer_can_be_written_directly():
    buffer = host_buffer(12345, torch.device("cpu"))
    assert buffer.shape == (12345,) and buffer.data_ptr() % BLOCK_BYTES == 0
    assert host_buffer(0, torch.device("cpu")).numel() == 0


@pytest.mark.parametrize("code", [0, 2])
def test_memory_that_cuda_cannot_lock_is_named(monkeypatch, code):
    """Without a GPU: what CUDA's runtime returns is given."""
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: code, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    expected = r"^0.1 GB of host .* \(CUDA error 2\); set checkpoint.asynchronous=false, or give each rank more memory$"
    with pytest.raises(RuntimeError, match=expected) if code else nullcontext():
        assert host_buffer(25_000_000, torch.device("cuda")).numel() == 25_000_000
