"""Boxes: rectangular pieces of tensors, by which parts of flattened tensors are described and compared."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod


@dataclass(frozen=True)
class Box:
    """The elements ``start[d] <= index[d] < start[d] + shape[d]`` of a tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements in the box."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that cut the box out of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The box of the common elements; None where there are none."""
        if self == other and all(self.shape):
            return self
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape, strict=True))
        shape = tuple(end - first for end, first in zip(ends, start, strict=True))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def shifted(self, origin: Sequence[int]) -> "Box":
        """The same box in coordinates whose zero is at ``origin``, which is subtracted from its start."""
        return Box(tuple(a - o for a, o in zip(self.start, origin, strict=True)), self.shape)


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements of a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements [start, stop) of the flattened tensor of this shape, as the fewest boxes, in order.

    There are at most 2 dims - 1 of them.
    """
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


def span_within(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """The range of the flattened tensor that spans ``box``: its first element's index, and its last one's plus 1."""
    start, stop = 0, 0
    for size, low, count in zip(shape, box.start, box.shape, strict=True):
        start, stop = start * size + low, stop * size + low + count - 1
    return start, stop + 1


def coverage_error(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """None if the boxes hold every element of a tensor of this shape exactly once; else what is wrong, in words.

    The number of boxes that hold an element changes only at the boxes' corners, so the boxes cover the tensor exactly
    if their signed corners add up to the tensor's own. The cost is therefore linear in the number of boxes, with 2^dims
    corners each.
    """
    boxes = list(boxes)
    for box in boxes:
        if not len(box.start) == len(box.shape) == len(shape) or any(
            a < 0 or n < 1 or a + n > size for a, n, size in zip(box.start, box.shape, shape, strict=True)
        ):
            return f"box {box.start}+{box.shape} lies outside shape {tuple(shape)}"
    jumps: dict[tuple[int, ...], int] = {}
    for count, box in ((-1, whole(shape)), *((1, box) for box in boxes)):
        for corner, sign in _signed_corners(box):
            jumps[corner] = jumps.get(corner, 0) + count * sign
    wrong = min((corner for corner, jump in jumps.items() if jump), default=None)
    if wrong is None:
        return None
    if jumps[wrong] > 0:  # nothing jumps at smaller indices, so this is how often too many the element is held
        first, second = [box for box in boxes if _holds(box, wrong)][:2]
        return f"boxes {first.start}+{first.shape} and {second.start}+{second.shape} overlap"
    missing, total = prod(shape) - sum(box.numel for box in boxes), prod(shape)
    return f"{missing} of {total} elements are missing" if missing > 0 else f"element {list(wrong)} is missing"


def _signed_corners(box: Box) -> Iterator[tuple[tuple[int, ...], int]]:
    """The box's 2^dims corners (first index or one past the last, in each dim), each with its sign, 1 or -1."""
    ends = [(a, a + n) for a, n in zip(box.start, box.shape, strict=True)]
    return zip(product(*ends), _signs(len(ends)), strict=True)


@cache
def _signs(n_dims: int) -> tuple[int, ...]:
    return tuple(prod(signs) for signs in product((1, -1), repeat=n_dims))


def _holds(box: Box, index: Sequence[int]) -> bool:
    return all(a <= i < a + n for a, n, i in zip(box.start, box.shape, index, strict=True))
