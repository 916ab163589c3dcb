"""Writes and reads safetensors files as streams: 8 bytes of header length (little endian), a JSON header, the data.

safetensors' own writer needs all tensors in memory at once, and makes its own pass over them; here the data come in
chunks and are hashed on the way. Every tensor is fp32, so any chunk boundary at a multiple of 4 bytes lies between
elements.
"""

import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Self

import torch
import xxhash
from torch import Tensor

from parallel.checkpoint.errors import IncompleteSave
from parallel.checkpoint.local import BLOCK_BYTES
from parallel.checkpoint.schema import (
    LARGEST_HEADER_BYTES,
    HeaderEntry,
    Malformed,
    parse_any_header,
    parse_header,
    shorten,
)
from parallel.checkpoint.store import Folder, Input, Output

LENGTH_BYTES = 8
ELEMENT_BYTES = 4
ELEMENT_BYTES_OF = {"F32": 4, "BF16": 2, "F16": 2}  # of the dtypes that other programs' models may have
CHUNK_BYTES = 1 << 18  # of one read, hash and copy: small enough that two stay in the processor's cache
WRITE_BYTES = 4 << 20  # of one hash and write


class NotSafetensors(Exception):
    """The bytes are no fp32 safetensors file; the message says why."""


@dataclass(frozen=True)
class Header:
    """Each tensor's first byte, counted from the file's start, and its shape, by key."""

    offsets: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]


def encode_header(shapes: Mapping[str, Sequence[int]]) -> bytes:
    """The bytes before the data of these fp32 tensors, which follow in this order without gaps.

    They are padded to whole blocks, so that writing the data can bypass the page cache. Raises IncompleteSave where the
    header would be too long to be read.
    """
    entries, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + ELEMENT_BYTES * prod(shape)
        entries[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % BLOCK_BYTES)
    if len(text) > LARGEST_HEADER_BYTES:
        raise IncompleteSave(f"a shard of {len(shapes)} pieces has a header of {len(text)} bytes, too many to be read")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(file: Input, file_bytes: int) -> Header:
    """The header of an opened file of ``file_bytes`` bytes.

    Raises NotSafetensors unless the tensors are fp32, and follow one another without gaps from the header's end to the
    file's.
    """
    length, entries = _read_entries(file, file_bytes, parse_header)
    offsets, end = {}, 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype != "F32":
            raise NotSafetensors(f"holds {key} as {shorten(entry.dtype)}, not F32")
        start, end = end, end + ELEMENT_BYTES * prod(entry.shape)
        if entry.data_offsets != (start, end):
            raise NotSafetensors(f"holds {key} at bytes {list(entry.data_offsets)}, not {[start, end]}")
        offsets[key] = LENGTH_BYTES + length + start
    if LENGTH_BYTES + length + end > file_bytes:
        raise NotSafetensors("ends too early")
    if LENGTH_BYTES + length + end < file_bytes or length % ELEMENT_BYTES:
        raise NotSafetensors(f"has {file_bytes} bytes, and its header and tensors {LENGTH_BYTES + length + end}")
    return Header(offsets, {key: entry.shape for key, entry in entries.items()})


def read_any_header(file: Input, file_bytes: int) -> tuple[int, dict[str, HeaderEntry]]:
    """The first byte of the data, and the header's entries by key, of any safetensors file, with tensors of any dtype.

    Raises NotSafetensors unless the tensors follow one another without gaps from the header's end to the file's, and
    those of the dtypes in ``ELEMENT_BYTES_OF`` have the number of bytes that their shapes need.
    """
    length, entries = _read_entries(file, file_bytes, parse_any_header)
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, stop = entry.data_offsets
        needed = ELEMENT_BYTES_OF.get(entry.dtype, 0) * prod(entry.shape) or stop - start
        if start != end or stop - start != needed:
            raise NotSafetensors(f"holds {key} at bytes {[start, stop]}, not {[end, end + needed]}")
        end = stop
    if LENGTH_BYTES + length + end != file_bytes:
        whole = LENGTH_BYTES + length + end
        rule = "ends too early: it" if whole > file_bytes else "is too long: it"
        raise NotSafetensors(f"{rule} has {file_bytes} bytes, and its header and tensors {whole}")
    return LENGTH_BYTES + length, entries


def _read_entries(
    file: Input, file_bytes: int, parse: Callable[[bytes], dict[str, HeaderEntry]]
) -> tuple[int, dict[str, HeaderEntry]]:
    """The header's length in bytes, and its entries as ``parse`` returns them. Raises NotSafetensors."""
    length = int.from_bytes(read_exactly(file, LENGTH_BYTES), "little")
    if length > min(LARGEST_HEADER_BYTES, file_bytes):
        raise NotSafetensors(f"has a header of {length} bytes")
    try:
        return length, parse(read_exactly(file, length))
    except Malformed as error:
        raise NotSafetensors(f"has a header that is not safetensors': {error}") from None


def read_exactly(file: Input, n_bytes: int) -> bytes:
    """The next ``n_bytes`` bytes of the file. Raises NotSafetensors where it ends before."""
    data = bytearray(n_bytes)
    read_into(file, memoryview(data))
    return bytes(data)


def read_into(file: Input, view: memoryview) -> None:
    """Fills the view with the next bytes of the file. Raises NotSafetensors where it ends before."""
    while len(view):
        got = file.readinto(view)
        if not got:
            raise NotSafetensors("ends too early")
        view = view[got:]


def write_tensors(folder: Folder, file: str, shapes: Mapping[str, Sequence[int]], chunks: Iterable[memoryview]) -> dict:
    """Writes and syncs a safetensors file whose data come in chunks; returns its size and hash, for the manifest."""
    return write_hashed(folder, file, _preceded(encode_header(shapes), chunks))


def write_hashed(folder: Folder, file: str, chunks: Iterable[memoryview | bytes]) -> dict[str, int | str]:
    """Writes and syncs a file from chunks, and hashes it on the way; returns its size and hash, for the manifest.

    While one chunk is made and hashed, the previous one is being written. So each chunk must not change until the
    second one after it is asked for.
    """
    digest, n_bytes = xxhash.xxh3_128(), 0
    with folder.create(file) as out, _Behind(out) as behind:
        for chunk in chunks:
            digest.update(chunk)
            n_bytes += len(chunk)
            behind.write(chunk)
    return {"bytes": n_bytes, "xxh3_128": digest.hexdigest()}


class _Behind:
    """Writes each chunk in a thread while the caller makes the next one; a context manager, left when all is written.

    The two share only queues. A lock, such as a future's, would stay locked if a signal handler raised at the wrong
    moment, and the thread would wait for it for ever.
    """

    def __init__(self, out: Output) -> None:
        self._out = out
        self._chunks: queue.SimpleQueue[memoryview | bytes | None] = queue.SimpleQueue()  # None: no more
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry: one more chunk may be given
        self._error: BaseException | None = None  # of a chunk that could not be written
        self._thread = threading.Thread(target=self._work, name="checkpoint disk", daemon=True)

    def write(self, chunk: memoryview | bytes) -> None:
        """Starts writing a chunk once the previous one is written; raises the error of one that could not be."""
        self._room.get()
        if self._error is not None:
            raise self._error
        self._chunks.put(chunk)

    def __enter__(self) -> Self:
        self._room.put(None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._chunks.put(None)
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            try:
                self._out.write(chunk)
            except BaseException as error:  # the caller raises it
                self._error = error
            self._room.put(None)


def _preceded(header: bytes, chunks: Iterable[memoryview]) -> Iterator[memoryview | bytes]:
    yield header
    yield from chunks


def bytes_of(flat: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place."""
    return flat.detach().numpy().data.cast("B")


def chunks_of(flat: Tensor) -> Iterator[memoryview]:
    """A flat CPU tensor's bytes, in place, in chunks of WRITE_BYTES."""
    view = bytes_of(flat)
    for start in range(0, len(view), WRITE_BYTES):
        yield view[start : start + WRITE_BYTES]


def staged(tensors: Iterable[Tensor], staging: Tensor) -> Iterator[memoryview]:
    """The bytes of the tensors' elements, one tensor after another, in chunks of half of ``staging``.

    Chunks are copies in the two halves of ``staging`` (a flat CPU tensor) alternately, so each is valid until the
    second one after it is asked for.
    """
    halves, filled = staging.chunk(2), 0
    for tensor in tensors:
        flat, done = tensor.detach().reshape(-1), 0
        while done < flat.numel():
            count = min(flat.numel() - done, halves[0].numel() - filled)
            halves[0][filled : filled + count].copy_(flat[done : done + count])
            done, filled = done + count, filled + count
            if filled == halves[0].numel():
                yield bytes_of(halves[0])
                halves, filled = halves[::-1], 0
    if filled:
        yield bytes_of(halves[0][:filled])


def copy_all(tensors: Iterable[Tensor], buffer: Tensor) -> None:
    """Copies the tensors' elements one after another into ``buffer`` (flat, fp32, CPU), and waits for the copies."""
    done, waits = 0, False
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        buffer[done : done + flat.numel()].copy_(flat, non_blocking=True)
        done, waits = done + flat.numel(), waits or flat.is_cuda
    assert done == buffer.numel(), "the buffer was made for these tensors"
    if waits:
        torch.cuda.current_stream().synchronize()
