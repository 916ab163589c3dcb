"""Reads shards in pieces, hashes them on the way, and copies their elements into the tensors where they belong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from parallel.checkpoint.boxes import Box, boxes_of_range, span_within
from parallel.checkpoint.safetensors_stream import (
    CHUNK_BYTES,
    ELEMENT_BYTES,
    Header,
    NotSafetensors,
    bytes_of,
    read_header,
    read_into,
)
from parallel.checkpoint.schema import Piece
from parallel.checkpoint.store import Folder, Input

SMALLEST_RUN = 1 << 16  # the fewest bytes that get a read of their own
LARGEST_GAP = 1 << 20  # the most unneeded bytes in a row that are read, rather than skipped by a seek


@dataclass(frozen=True)
class Target:
    """A box of a logical tensor that is to be read, and the tensor of the box's shape that it is read into."""

    box: Box
    values: Tensor


@dataclass(frozen=True)
class _Wish:
    """The part of a piece that a target needs: bytes [start, stop) of the file. The piece begins at byte ``first``."""

    piece: Piece
    target: Target
    first: int
    start: int
    stop: int


def span_of(piece: Piece, box: Box) -> tuple[int, int] | None:
    """The range of the flattened piece that spans its elements in ``box``; None where it has none."""
    common = piece.box.intersect(box)
    if common is None:
        return None
    if common.shape == piece.shape:
        return 0, common.numel
    return span_within(piece.shape, common.shifted(piece.start))


class ShardReader:
    """Reads shards of a folder, through a buffer of CHUNK_BYTES that is page-locked where the targets are on CUDA."""

    def __init__(self, folder: Folder, device: torch.device) -> None:
        self.folder = folder
        self.buffer = torch.empty(CHUNK_BYTES // ELEMENT_BYTES, pin_memory=device.type == "cuda")
        self.bytes = bytes_of(self.buffer)

    def read(self, file: str, wanted: Sequence[tuple[Piece, Target]], *, hashes: bool) -> str | None:
        """Reads the elements of the targets that the pieces of this file hold; returns its xxh3_128 if ``hashes``.

        To be hashed, the file is read whole; else only the parts that are needed. Raises NotSafetensors where its
        header is not valid or differs from the pieces, and OSError where it cannot be read.
        """
        digest = xxhash.xxh3_128() if hashes else None
        with self.folder.open(file) as content:
            wishes: list[_Wish] = []
            if wanted:
                header = read_header(content, self.folder.size(file) or 0)
                wishes = sorted((_wish(header, *each) for each in wanted), key=lambda wish: wish.start)
            intervals = [(0, max((wish.stop for wish in wishes), default=0))] if hashes else list(_intervals(wishes))
            window = _Window(wishes)
            for start, stop in intervals:
                content.seek(start)
                for first, last, memory in _segments(wishes, start, stop):
                    if memory is not None:
                        self._read_in_place(content, memory, digest)
                    else:
                        self._read_staged(content, first, last, window, digest)
            while digest is not None and (got := content.readinto(self.bytes)):
                digest.update(self.bytes[:got])
        return None if digest is None else digest.hexdigest()

    def _read_in_place(self, content: Input, memory: memoryview, digest: "xxhash.xxh3_128 | None") -> None:
        """Reads the next bytes into ``memory``, in chunks that are hashed while they are in the processor's cache."""
        for start in range(0, len(memory), CHUNK_BYTES):
            chunk = memory[start : start + CHUNK_BYTES]
            read_into(content, chunk)
            if digest is not None:
                digest.update(chunk)

    def _read_staged(
        self, content: Input, start: int, stop: int, window: "_Window", digest: "xxhash.xxh3_128 | None"
    ) -> None:
        """Reads bytes [start, stop), which are next in the file, through the buffer."""
        for position in range(start, stop, CHUNK_BYTES):
            count = min(CHUNK_BYTES, stop - position)
            read_into(content, self.bytes[:count])
            if digest is not None:
                digest.update(self.bytes[:count])
            self._scatter(window.until(position, position + count), position, count)

    def _scatter(self, wishes: Sequence[_Wish], position: int, count: int) -> None:
        """Copies the buffer, ``count`` bytes of the file from ``position`` on, to where the wishes need it."""
        waits = False
        for wish in wishes:
            start, stop = max(position, wish.start), min(position + count, wish.stop)
            values = self.buffer[(start - position) // ELEMENT_BYTES : (stop - position) // ELEMENT_BYTES]
            first = (start - wish.first) // ELEMENT_BYTES
            _copy_elements(wish, first, values)
            waits = waits or wish.target.values.is_cuda
        if waits:  # before the buffer is filled again
            torch.cuda.current_stream().synchronize()


def _copy_elements(wish: _Wish, first: int, values: Tensor) -> None:
    """Copies ``values``, the flattened piece's elements from ``first`` on, as far as they lie in the target's box."""
    done = 0
    for box in boxes_of_range(wish.piece.shape, first, first + values.numel()):
        part = values[done : done + box.numel].view(box.shape)
        done += box.numel
        absolute = box.shifted([-start for start in wish.piece.start])
        common = absolute.intersect(wish.target.box)
        if common is not None:
            into = wish.target.values[common.shifted(wish.target.box.start).slices]
            into.copy_(part[common.shifted(absolute.start).slices], non_blocking=True)


def _wish(header: Header, piece: Piece, target: Target) -> _Wish:
    if header.shapes.get(piece.key) != piece.shape:
        raise NotSafetensors(f"does not hold {piece.key} as the manifest says")
    span = span_of(piece, target.box)
    assert span is not None
    first = header.offsets[piece.key]
    return _Wish(piece, target, first, first + ELEMENT_BYTES * span[0], first + ELEMENT_BYTES * span[1])


class _Window:
    """Finds the wishes, sorted by their start, that overlap intervals which only move forward."""

    def __init__(self, wishes: list[_Wish]) -> None:
        self.wishes = wishes
        self.next = 0
        self.active: list[_Wish] = []

    def until(self, start: int, stop: int) -> list[_Wish]:
        """The wishes that overlap [start, stop)."""
        while self.next < len(self.wishes) and self.wishes[self.next].start < stop:
            self.active.append(self.wishes[self.next])
            self.next += 1
        self.active = [wish for wish in self.active if wish.stop > start]
        return list(self.active)


def _intervals(wishes: list[_Wish]) -> Iterator[tuple[int, int]]:
    """The intervals of bytes to be read for the wishes, which are sorted by their start; small gaps are read too."""
    if not wishes:
        return
    start, stop = wishes[0].start, wishes[0].stop
    for wish in wishes[1:]:
        if wish.start > stop + LARGEST_GAP:
            yield start, stop
            start, stop = wish.start, wish.stop
        stop = max(stop, wish.stop)
    yield start, stop


def _segments(wishes: list[_Wish], start: int, stop: int) -> Iterator[tuple[int, int, memoryview | None]]:
    """Bytes [start, stop) in segments (first, last, memory): ``memory`` is where to read them directly, else None."""
    reached = 0  # the end of the wishes so far: bytes that two wishes need go through the buffer
    for number, wish in enumerate(wishes):
        alone = wish.start >= reached and (number + 1 == len(wishes) or wishes[number + 1].start >= wish.stop)
        reached = max(reached, wish.stop)
        memory = _memory_of(wish) if alone and start <= wish.start and wish.stop <= stop else None
        if memory is not None:
            if wish.start > start:
                yield start, wish.start, None
            yield wish.start, wish.stop, memory
            start = wish.stop
    if stop > start:
        yield start, stop, None


def _memory_of(wish: _Wish) -> memoryview | None:
    """The target's memory for the wish's bytes, if it is one run that is worth a read of its own; else None."""
    common = wish.piece.box.intersect(wish.target.box)
    assert common is not None
    into = wish.target.values
    if common.shape != wish.target.box.shape:
        into = into[common.shifted(wish.target.box.start).slices]
    is_one_run = common.numel * ELEMENT_BYTES == wish.stop - wish.start
    if not is_one_run or wish.stop - wish.start < SMALLEST_RUN or into.is_cuda or not into.is_contiguous():
        return None
    return bytes_of(into.view(-1))
