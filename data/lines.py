"""Reading the lines of text and jsonl files, plain or compressed, in bounded memory whatever the files hold."""

import gzip
import io
from collections.abc import Iterator
from contextlib import closing
from typing import BinaryIO

import zstandard

from data.errors import DataError, refuse
from data.shards import Slice

LONGEST_LINE = 1 << 26  # bytes: a document of 64 MiB is a whole library, or a file that is not lines
# Text compresses to a fifth, a log to a fiftieth. What compresses further is not prose, or made to fill memory.
LARGEST_RATIO = 200
FREE_BYTES = 1 << 26  # any file may unpack to this size, whatever its own
FED_BYTES = 2048  # compressed bytes given to zstd at once: a block of 4 bytes may unpack to 128 KiB
BLOCK = 1 << 20
MEND = "mend it, or leave it out with exclude"
Line = tuple[bytes, int]  # the line, newline included, and the byte of the text that it begins at


def read_lines(piece: Slice) -> Iterator[Line]:
    """(line, place of its first byte) of all lines of a compressed file, or of those beginning in a plain slice.

    Raises DataError for a line longer than LONGEST_LINE and for a file that unpacks to far too much, and OSError,
    EOFError, zlib.error or ZstdError where it cannot be read.
    """
    if piece.kind not in ("jsonl.gz", "jsonl.zst"):
        yield from _lines_within(piece)
        return
    limit, position = Expansion(piece.path, piece.stop), 0
    with open(piece.path, "rb") as file, closing(_unpack(file, piece)) as stream:
        while line := _next_line(stream, piece, position):
            yield line, position
            position += len(line)
            limit.check(position)


class Expansion:
    """The limit on the size that a file unpacks to: LARGEST_RATIO times its ``n_bytes``, but at least FREE_BYTES."""

    def __init__(self, path: str, n_bytes: int) -> None:
        self.path = path
        self.most = max(FREE_BYTES, LARGEST_RATIO * n_bytes)

    def check(self, n_bytes: int) -> None:
        """Raises DataError where ``n_bytes`` exceeds the limit."""
        if n_bytes > self.most:
            rule = f"unpacks to more than {LARGEST_RATIO} times its size"
            raise refuse(self.path, rule, "leave it out with exclude, or store it plain if it is text")


def line_number(piece: Slice, position: int) -> int:
    """The number, from 1, of the line that begins at byte ``position``. It reads the file up to there."""
    number = 1
    for line, start in read_lines(Slice(piece.path, piece.kind, 0, max(piece.stop, 1), 0)):
        if start >= position:
            break
        number += line.endswith(b"\n")
    return number


def _lines_within(piece: Slice) -> Iterator[Line]:
    with open(piece.path, "rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            _skip_line(file, piece)  # the rest of one that began earlier; just the newline where one begins at start
        position = file.tell()
        while position < piece.stop and (line := _next_line(file, piece, position)):
            yield line, position
            position += len(line)


def _next_line(file: io.BufferedIOBase | BinaryIO, piece: Slice, position: int) -> bytes:
    line = file.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise _too_long(piece, f"the line from byte {position} on")
    return line


def _skip_line(file: BinaryIO, piece: Slice) -> None:
    for _ in range(LONGEST_LINE // BLOCK + 1):
        block = file.readline(BLOCK)
        if not block or block.endswith(b"\n"):
            return
    raise _too_long(piece, f"the line around byte {piece.start}")


def _too_long(piece: Slice, which: str) -> DataError:
    return refuse(f"{piece.path}: {which}", f"is longer than {LONGEST_LINE} bytes", f"break it up; {MEND}")


def _unpack(file: BinaryIO, piece: Slice) -> io.BufferedIOBase:
    if piece.kind == "jsonl.gz":
        return gzip.GzipFile(fileobj=file)
    return io.BufferedReader(_Zstd(file))


class _Zstd(io.RawIOBase):
    """The unpacked bytes of a file of zstd frames. Unlike zstandard's reader it raises EOFError if truncated."""

    def __init__(self, file: BinaryIO) -> None:
        self._chunks = _unpack_frames(file)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        n_bytes = min(len(buffer), len(self._rest))
        buffer[:n_bytes] = self._rest[:n_bytes]
        self._rest = self._rest[n_bytes:]
        return n_bytes


def _unpack_frames(file: BinaryIO) -> Iterator[bytes]:
    decompressor, frame = zstandard.ZstdDecompressor(), None
    while data := file.read(FED_BYTES):
        while data:
            frame = frame or decompressor.decompressobj()
            yield frame.decompress(data)
            if not frame.eof:
                break
            data, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("it ends in the middle of a compressed frame")
