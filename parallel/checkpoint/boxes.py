"""Rectangular pieces of tensors: how flat partitions are described, compared and put together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """The elements ``start[d] <= index[d] < start[d] + shape[d]`` of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """For indexing the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The common elements, or None."""
        if self == other and all(self.shape):
            return self
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(end - first for end, first in zip(ends, start, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def shifted(self, origin: Sequence[int]) -> "Box":
        """The same box in coordinates whose zero is at ``origin``."""
        return Box(tuple(a - o for a, o in zip(self.start, origin, strict=True)), self.shape)


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of the flattened tensor, in order, as the fewest boxes: at most 2 dims - 1 of them."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,) if shape else (), (stop - start,) if shape else ())]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _in_row(shape, first, start - first * row, stop - first * row)
    boxes = []
    if start % row:
        boxes += _in_row(shape, first, start - first * row, row)
        first += 1
    end = last + 1 if stop % row == 0 else last
    if end > first:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (end - first, *shape[1:])))
    if stop % row:
        boxes += _in_row(shape, last, 0, stop - last * row)
    return boxes


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    inner = boxes_of_range(shape[1:], start, stop)
    return [Box((row, *box.start), (1, *box.shape)) for box in inner]


def coverage_error(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """None where the boxes hold every element of the tensor exactly once; else what is wrong, in words.

    Boxes that are inside the tensor, do not overlap, and add up to its number of elements cover it. Overlaps are
    searched for along the first dim, in order, so the cost is near linear for what layouts produce.
    """
    boxes = sorted(boxes, key=lambda box: box.start)
    for box in boxes:
        if len(box.start) != len(shape) or any(
            a < 0 or n < 1 or a + n > size for a, n, size in zip(box.start, box.shape, shape, strict=False)
        ):
            return f"box {box.start}+{box.shape} lies outside shape {tuple(shape)}"
    active: list[Box] = []
    for box in boxes:
        active = [other for other in active if not shape or other.start[0] + other.shape[0] > box.start[0]]
        for other in active:
            if box.intersect(other) is not None:
                return f"boxes {other.start}+{other.shape} and {box.start}+{box.shape} overlap"
        active.append(box)
    covered, total = sum(box.numel for box in boxes), prod(shape)
    return None if covered == total else f"{total - covered} of {total} elements are missing"
