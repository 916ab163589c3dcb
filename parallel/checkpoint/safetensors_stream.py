"""The safetensors format as a stream: 8 bytes of header length (little endian), a JSON header, the tensors' bytes.

safetensors' own writer wants all tensors in memory at once and its own pass over them; here they come in chunks, hashed
on the way. Every tensor is fp32, so any chunk boundary that is a multiple of 4 bytes lies between elements.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
import xxhash
from torch import Tensor

from parallel.checkpoint.folder import BLOCK_BYTES, Folder, Input

LENGTH_BYTES = 8
ELEMENT_BYTES = 4
LARGEST_HEADER_BYTES = 100_000_000  # safetensors' own limit
CHUNK_BYTES = 1 << 18  # of one read, hash and copy: small enough to stay in the processor's cache, twice
WRITE_BYTES = 4 << 20  # of one hash and write


class NotSafetensors(Exception):
    """The bytes are no fp32 safetensors file; the message says why."""


@dataclass(frozen=True)
class Header:
    """Where each tensor lies in a file: its first byte, counted from the file's start, and its shape."""

    offsets: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    data_start: int


def encode_header(shapes: Mapping[str, Sequence[int]]) -> bytes:
    """What precedes the data of these tensors, which follow in this order without gaps.

    It is padded to whole blocks, so that the data can be written past the page cache.
    """
    entries, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + ELEMENT_BYTES * prod(shape)
        entries[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % BLOCK_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_header(file: Input) -> Header:
    """The header of an opened file; raises NotSafetensors."""
    length = int.from_bytes(read_exactly(file, LENGTH_BYTES), "little")
    if length > LARGEST_HEADER_BYTES:
        raise NotSafetensors(f"has a header of {length} bytes")
    try:
        entries = json.loads(read_exactly(file, length))
        entries.pop("__metadata__", None)
        foreign = [key for key, entry in entries.items() if entry["dtype"] != "F32"]
        start = LENGTH_BYTES + length
        offsets = {key: start + entry["data_offsets"][0] for key, entry in entries.items()}
        shapes = {key: tuple(entry["shape"]) for key, entry in entries.items()}
        _check_order(offsets, shapes, start)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise NotSafetensors("has a header that is not safetensors'") from error
    if foreign:
        raise NotSafetensors(f"holds {foreign[0]} as {entries[foreign[0]]['dtype']}, not F32")
    return Header(offsets, shapes, start)


def _check_order(offsets: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], start: int) -> None:
    """Raises ValueError where the tensors do not follow one another without gaps, at multiples of 4 bytes."""
    for key in sorted(offsets, key=lambda key: offsets[key]):
        if offsets[key] != start or start % ELEMENT_BYTES:
            raise ValueError(key)
        start += ELEMENT_BYTES * prod(shapes[key])


def read_exactly(file: Input, n_bytes: int) -> bytes:
    """The next bytes; raises NotSafetensors where the file ends before."""
    data = bytearray(n_bytes)
    read_into(file, memoryview(data))
    return bytes(data)


def read_into(file: Input, view: memoryview) -> None:
    """Fills the view; raises NotSafetensors where the file ends before."""
    while len(view):
        got = file.readinto(view)
        if not got:
            raise NotSafetensors("ends too early")
        view = view[got:]


def write_tensors(folder: Folder, file: str, shapes: Mapping[str, Sequence[int]], chunks: Iterable[memoryview]) -> dict:
    """Writes and syncs a safetensors file whose data comes in chunks; its size and hash, for the manifest."""
    return write_hashed(folder, file, _preceded(encode_header(shapes), chunks))


def write_hashed(folder: Folder, file: str, chunks: Iterable[memoryview | bytes]) -> dict[str, int | str]:
    """Writes and syncs a file, hashing on the way; its size and hash, for the manifest.

    One chunk is made and hashed while the one before it is written, so each must stay as it is until the second next
    one is asked for.
    """
    digest, n_bytes = xxhash.xxh3_128(), 0
    with folder.create(file) as out, ThreadPoolExecutor(1, "checkpoint disk") as disk:
        writing: Future[None] | None = None
        for chunk in chunks:
            digest.update(chunk)
            n_bytes += len(chunk)
            if writing is not None:
                writing.result()
            writing = disk.submit(out.write, chunk)
        if writing is not None:
            writing.result()
    return {"bytes": n_bytes, "xxh3_128": digest.hexdigest()}


def _preceded(header: bytes, chunks: Iterable[memoryview]) -> Iterator[memoryview | bytes]:
    yield header
    yield from chunks


def bytes_of(flat: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, in place."""
    return flat.detach().numpy().data.cast("B")


def chunks_of(flat: Tensor) -> Iterator[memoryview]:
    """A flat CPU tensor's bytes, in place, in chunks."""
    view = bytes_of(flat)
    for start in range(0, len(view), WRITE_BYTES):
        yield view[start : start + WRITE_BYTES]


def staged(tensors: Iterable[Tensor], staging: Tensor) -> Iterator[memoryview]:
    """The tensors' elements one after another, in chunks that stay until the second next one is asked for.

    They are copies in the two halves of ``staging`` (CPU), in turn.
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
