"""Describes compactly which ranges of which tensors the ranks own: boxes cut into ranges, one for each replica.

Under ZeRO 3 without pipeline stages each of 2,048 ranks owns a range of every tensor of the model. Listed box by box
these are millions of lines; but the ranges of one box follow one another from rank to rank, and mostly have one size.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from parallel.checkpoint.boxes import Box, boxes_of_range, span_within
from parallel.checkpoint.schema import MOST_DIMS, Cut, Piece, Run

NAME, KINDS, FIRST, NUMEL = range(4)  # columns of a table of what ranks own
START, SHAPE = slice(4, 4 + MOST_DIMS), slice(4 + MOST_DIMS, 4 + 2 * MOST_DIMS)
SHARD = 4 + 2 * MOST_DIMS


def key_of(kind: str, name: str, start: Sequence[int]) -> str:
    """The key, in its shard, of a tensor's box that begins at ``start``."""
    return f"{kind}/{name}/{'.'.join(map(str, start))}"


@dataclass(frozen=True)
class Owned:
    """Elements [first, first + numel) of the flattened box ``held`` of a logical tensor, in every one of ``kinds``."""

    kinds: tuple[str, ...]
    name: str
    held: Box
    first: int
    numel: int

    def boxes(self) -> list[Box]:
        """The owned elements in order, as boxes of the logical tensor."""
        origin = [-start for start in self.held.start]
        return [box.shifted(origin) for box in boxes_of_range(self.held.shape, self.first, self.first + self.numel)]

    def pieces(self, file: str) -> list[Piece]:
        """One Piece for every box of every kind, as it is stored in ``file``."""
        boxes = self.boxes()
        return [
            Piece(kind, self.name, box.start, box.shape, file, key_of(kind, self.name, box.start))
            for kind in self.kinds
            for box in boxes
        ]


@dataclass(frozen=True)
class Packed:
    """What one rank owns, in the form in which it is sent to rank 0: a compressed int64 table.

    Its rows name tensors by their number in the model's order, and kinds by their position in ``kinds``.
    """

    kinds: list[tuple[str, ...]]
    table: bytes


def pack(owned: Sequence[Owned], names: Iterable[str]) -> Packed:
    """What a rank owns, packed to be sent. ``names``: all logical tensors' names, in the order that numbers them."""
    numbers = {name: number for number, name in enumerate(names)}
    kinds = list(dict.fromkeys(each.kinds for each in owned))
    kind_numbers = {each: number for number, each in enumerate(kinds)}
    rows = [
        (numbers[each.name], kind_numbers[each.kinds], each.first, each.numel, *_padded(each.held)) for each in owned
    ]
    table = np.array(rows, dtype=np.int64)
    return Packed(kinds, zlib.compress(table.tobytes(), 1))


def _padded(held: Box) -> tuple[int, ...]:
    """A box's start and shape, each filled up with zeros to MOST_DIMS numbers, as columns of the table."""
    more = (0,) * (MOST_DIMS - len(held.shape))
    return *held.start, *more, *held.shape, *more


def merge(everyone: Sequence[Packed], shapes: dict[str, list[int]]) -> list[Cut]:
    """What all ranks own, as the fewest cuts; shard n is that of ``everyone[n]``.

    ``shapes``: all logical tensors' shapes by name, in the order that ``pack`` was given. Nothing is checked: where the
    ranges of a box do not follow one another from its first element to its last, each of their boxes becomes a cut of
    its own, and the certificate finds what is wrong.
    """
    kinds = list(dict.fromkeys(each for packed in everyone for each in packed.kinds))
    tables = [_unpacked(packed, number, kinds) for number, packed in enumerate(everyone)]
    rows = np.concatenate([np.zeros((0, SHARD + 1), dtype=np.int64), *tables])
    ordered_by = [FIRST, *range(START.stop - 1, START.start - 1, -1), KINDS, NAME]  # the last is the primary key
    rows = rows[np.lexsort([rows[:, column] for column in ordered_by])]
    about = np.delete(rows, [FIRST, NUMEL, SHARD], axis=1)  # the columns that are the same in all rows of one box
    ends = np.flatnonzero((about[1:] != about[:-1]).any(axis=1)) + 1
    names, cuts = list(shapes), []
    for group in np.split(rows, ends) if len(rows) else []:
        name, n_dims = names[group[0, NAME]], len(shapes[names[group[0, NAME]]])
        held = Box(tuple(group[0, START].tolist()[:n_dims]), tuple(group[0, SHAPE].tolist()[:n_dims]))
        cuts += _cuts_of(kinds[group[0, KINDS]], name, held, group)
    return cuts


def _unpacked(packed: Packed, shard: int, kinds: list[tuple[str, ...]]) -> np.ndarray:
    """One rank's table, with its shard's number as a further column and kinds numbered by ``kinds``, all ranks' own."""
    table = np.frombuffer(zlib.decompress(packed.table), dtype=np.int64).reshape(-1, SHARD)
    rows = np.insert(table, SHARD, shard, axis=1)
    rows[:, KINDS] = np.array([kinds.index(each) for each in packed.kinds], dtype=np.int64)[table[:, KINDS]]
    return rows


def _cuts_of(kinds: tuple[str, ...], name: str, held: Box, rows: np.ndarray) -> list[Cut]:
    """The cut of one box, from its ranges ordered by first element; a cut for each box if they do not partition it."""
    ranges: list[tuple[int, int, int]] = [tuple(row) for row in rows[:, [FIRST, NUMEL, SHARD]].tolist()]
    reached = 0
    for first, numel, _ in ranges:
        reached = reached + numel if first == reached and numel > 0 else -1
        if reached < 0:
            break
    if reached == held.numel:
        return [Cut(kinds, name, held.start, held.shape, runs_of([(numel, shard) for _, numel, shard in ranges]))]
    return [
        Cut(kinds, name, box.start, box.shape, [(1, box.numel, shard, 1)])
        for first, numel, shard in ranges
        for box in Owned(kinds, name, held, first, numel).boxes()
    ]


def runs_of(ranges: Sequence[tuple[int, int]]) -> list[Run]:
    """Consecutive ranges, each given as (elements, shard), grouped into runs by one scan."""
    runs: list[Run] = []
    done = 0
    while done < len(ranges):
        numel, first = ranges[done]
        count, stride = 1, 1
        if done + 1 < len(ranges) and ranges[done + 1][0] == numel and ranges[done + 1][1] != first:
            stride = ranges[done + 1][1] - first
            while done + count < len(ranges) and ranges[done + count] == (numel, first + count * stride):
                count += 1
        runs.append((count, numel, first, stride))
        done += count
    return runs


def pieces_within(cut: Cut, kind: str, shards: Sequence[str], box: Box) -> Iterator[Piece]:
    """The pieces of a cut, in one kind, that hold elements of ``box``. Only ranges that may hold some are visited."""
    common = cut.box.intersect(box)
    if common is None:
        return
    low, high = span_within(cut.shape, common.shifted(cut.start))
    first = 0
    for count, numel, shard, stride in cut.runs:
        for number in range(max(0, (low - first) // numel), min(count, -((first - high) // numel))):
            owned = Owned((kind,), cut.name, cut.box, first + number * numel, numel)
            file = shards[shard + number * stride]
            yield from (piece for piece in owned.pieces(file) if piece.box.intersect(box) is not None)
        first += count * numel


def every_piece_of(cut: Cut, shards: Sequence[str]) -> Iterator[Piece]:
    """The pieces of a cut in every one of its kinds."""
    for kind in cut.kinds:
        yield from pieces_within(cut, kind, shards, cut.box)


class ShardIndex:
    """Finds the ranges of cuts that are stored in a shard. The cuts must be valid (``fault_of`` returns None)."""

    def __init__(self, cuts: Sequence[Cut]) -> None:
        self.cuts = cuts
        rows = []
        for number, cut in enumerate(cuts):
            first = 0
            for count, numel, shard, stride in cut.runs:
                rows.append((number, first, count, numel, shard, stride if count > 1 else 1))
                first += count * numel
        self.numbers, self.firsts, self.counts, self.numels, self.shards, self.strides = (
            np.array(rows, dtype=np.int64).reshape(-1, 6).T
        )

    def owned(self, shard: int) -> list[Owned]:
        """All ranges that are stored in the shard of this number, in the order of the cuts."""
        steps, rest = np.divmod(shard - self.shards, self.strides)
        here = np.flatnonzero((steps >= 0) & (steps < self.counts) & (rest == 0))
        firsts = self.firsts[here] + steps[here] * self.numels[here]
        rows = zip(self.numbers[here].tolist(), firsts.tolist(), self.numels[here].tolist(), strict=True)
        cuts = self.cuts
        return [Owned(cuts[row].kinds, cuts[row].name, cuts[row].box, first, numel) for row, first, numel in rows]


def fault_of(cut: Cut, n_shards: int) -> str | None:
    """What is wrong with a cut's runs, in words; None if they hold each element once, in shards below ``n_shards``."""
    numel, held = sum(count * numel for count, numel, _, _ in cut.runs), prod(cut.shape)
    if numel != held:
        return f"box {cut.start}+{cut.shape} has {held} elements, and its ranges {numel}"
    for count, _, shard, stride in cut.runs:
        last = shard + (count - 1) * stride
        if not (0 <= shard < n_shards and 0 <= last < n_shards) or (count > 1 and stride == 0):
            return f"a run of {count} ranges from shard {shard} on, {stride} apart, is not one of {n_shards} shards"
    return None


def elements_by_shard(cuts: Iterable[Cut], n_shards: int) -> list[int]:
    """The number of elements, of all kinds, in each shard. The cuts must be valid (``fault_of`` returns None)."""
    found = np.zeros(n_shards, dtype=object)  # integers without a limit: the manifest is not trusted
    for cut in cuts:
        for count, numel, shard, stride in cut.runs:
            here = shard if count == 1 else shard + stride * np.arange(count)
            found[here] += len(cut.kinds) * numel
    return found.tolist()
