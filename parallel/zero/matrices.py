"""Whole matrices under ZeRO 1 to 3, which deal out elements without regard for where a matrix begins.

Each matrix has one owner among the ranks that share its weight's state. The others send it what they have of the
matrix, it computes, and it sends back to each what lies there. So each matrix is computed once (by all ranks of tp, if
they cut it), and one that lies on one rank already does not travel: of ZeRO 1's and 2's long partitions, that is most.

That is done in rounds of a bounded size. Those in which matrices travel come first, so that no rank waits for what
others compute of their own.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modeling.optimizers.matrices import Function, Matrices, Read, Write
from parallel.collectives import exchange_elements, gather_parts
from parallel.matrices import CutMatrices
from parallel.mesh import Axis
from parallel.zero.fragments import Share
from parallel.zero.weights import HeldWeight

Flat = tuple[Tensor, Sequence[tuple[HeldWeight, Share | None]]]  # what is updated, and whose elements lie where in it
Range = tuple[int, int]  # a first element, and how many


@dataclass(frozen=True)
class Matrix:
    """One matrix of a weight: where its elements lie in the flattened part that this rank computes with."""

    weight: HeldWeight
    start: int
    numel: int
    counts: list[int]  # how many of them each rank of the axis updates: a stretch each, in order
    owner: int  # the rank of the axis that computes with the whole

    @property
    def stays(self) -> bool:
        """Whether its owner has all of it."""
        return self.counts[self.owner] == self.numel


@dataclass(frozen=True)
class Stack:
    """Matrices of one weight that this rank owns, and where among what it received their elements lie, in order."""

    weight: nn.Parameter
    shape: tuple[int, ...]
    pieces: list[Range]


@dataclass(frozen=True)
class Round:
    """Matrices of one flat tensor: they go to the owners in the order of ``own``, back in that of their ``stacks``."""

    axis: Axis
    own: list[Range]  # of the flat tensor, what this rank has of each matrix: by owner, then in the weights' order
    sent: list[int]  # elements for each rank of the axis
    received: list[int]
    stacks: list[Stack]
    travels: bool  # not all lie on their owners alone


class DealtMatrices(Matrices):
    """Brings the elements of each matrix to its owner, and what it made of them back."""

    def __init__(self, flats: Sequence[Flat], cut: CutMatrices) -> None:
        """All ranks call it, with the tensors that their optimizers update in the same order."""
        super().__init__(cut.at_once)
        self.cut = cut
        loads: dict[tuple[int, ...], list[int]] = defaultdict(list)  # elements that each rank of an axis owns so far
        self.rounds = {flat: plan_rounds(held, loads, self.at_once) for flat, held in flats}

    def transform(self, weight: Tensor, read: Read, function: Function, write: Write) -> None:
        """All ranks that share the state of the flat tensor ``weight`` call it, and all of tp. Padding is left out."""
        if weight not in self.rounds:
            raise ValueError(
                "matrices.transform is for weights of groups with takes_whole=True, as the rule says of them"
            )
        for plan in self.rounds[weight]:
            found = cat([read(*place) for place in plan.own]) if plan.own else read(0, 0)
            if plan.travels:
                found = exchange_elements(found, plan.sent, plan.received, plan.axis)
            made = torch.empty_like(found)
            for stack in plan.stacks:
                whole = cat([found.narrow(0, *piece) for piece in stack.pieces]).view(stack.shape)
                result = self.cut.of_whole(stack.weight, whole, function).reshape(-1)
                for piece, values in zip(stack.pieces, result.split([numel for _, numel in stack.pieces]), strict=True):
                    made.narrow(0, *piece).copy_(values)
            if plan.travels:
                made = exchange_elements(made, plan.received, plan.sent, plan.axis)
            for (start, _), values in zip(plan.own, made.split([numel for _, numel in plan.own]), strict=True):
                write(start, values)


def plan_rounds(
    held: Sequence[tuple[HeldWeight, Share | None]], loads: dict[tuple[int, ...], list[int]], at_once: int
) -> list[Round]:
    """How one flat tensor's matrices travel; adds to ``loads`` what each rank then owns. All ranks call it.

    The rounds in which matrices travel are the same on all ranks of the axis.
    """
    axis = held[0][0].replicas
    shares = shares_of_all(held, axis)
    load = loads[axis.ranks] or [0] * axis.degree
    loads[axis.ranks] = load
    matrices = [
        matrix
        for number, (weight, _) in enumerate(held)
        for matrix in matrices_of(weight, [ranks_shares[number] for ranks_shares in shares], load)
    ]
    offsets = {weight.parameter: share.offset - share.start for weight, share in held if share is not None}
    travelling = [matrix for matrix in matrices if not matrix.stays]
    staying = [matrix for matrix in matrices if matrix.stays and matrix.owner == axis.rank]
    return [
        plan_round(group, offsets, axis)
        for group in (*at_most(travelling, axis.degree, at_once), *at_most(staying, axis.degree, at_once))
    ]


def at_most(matrices: Iterable[Matrix], degree: int, at_once: int) -> Iterator[list[Matrix]]:
    """Groups in order, at least one matrix each, of which no rank sends or owns more than ``at_once`` elements."""
    group: list[Matrix] = []
    sent, owned = [0] * degree, [0] * degree
    for matrix in matrices:
        fits = max(map(sum, zip(sent, matrix.counts, strict=True))) <= at_once
        if group and not (fits and owned[matrix.owner] + matrix.numel <= at_once):
            yield group
            group, sent, owned = [], [0] * degree, [0] * degree
        group.append(matrix)
        sent = [count + more for count, more in zip(sent, matrix.counts, strict=True)]
        owned[matrix.owner] += matrix.numel
    if group:
        yield group


def plan_round(matrices: Sequence[Matrix], offsets: Mapping[nn.Parameter, int], axis: Axis) -> Round:
    """One round. ``offsets``: where in the flat tensor a weight's first element lies, or would lie."""
    own = []
    for matrix in sorted(matrices, key=lambda matrix: matrix.owner):  # those of one owner stay in order
        if matrix.counts[axis.rank]:
            start = matrix.start + sum(matrix.counts[: axis.rank])
            own.append((start + offsets[matrix.weight.parameter], matrix.counts[axis.rank]))
    sent = [sum(m.counts[axis.rank] for m in matrices if m.owner == rank) for rank in range(axis.degree)]
    mine = [matrix for matrix in matrices if matrix.owner == axis.rank]
    received = [sum(matrix.counts[rank] for matrix in mine) for rank in range(axis.degree)]
    travels = not all(matrix.stays for matrix in matrices)
    return Round(axis, joined(own), sent, received, stacks_of(mine, received), travels)


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same elements in the same order, with each range that begins where the one before ends joined to it."""
    found: list[Range] = []
    for start, numel in ranges:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + numel)
        else:
            found.append((start, numel))
    return found


def cat(parts: list[Tensor]) -> Tensor:
    """The parts behind each other, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shares_of_all(held: Sequence[tuple[HeldWeight, Share | None]], axis: Axis) -> list[list[Range]]:
    """Which elements of each weight's part each rank of the axis updates. All of them call it; 16 bytes a weight."""
    own = [(0, 0) if share is None else (share.start, share.numel) for _, share in held]
    return gather_parts(torch.tensor([own], device=held[0][0].parameter.device), 0, axis).tolist()


def matrices_of(weight: HeldWeight, shares: Sequence[Range], load: list[int]) -> Iterator[Matrix]:
    """The matrices of which a weight's part is a stack, each given to the rank that has most of it.

    Of several such ranks it is the one that owns least so far (``load``, to which this adds), and then the first.
    """
    numel = math.prod(weight.held.shape[-2:])
    for start in range(0, math.prod(weight.held.shape), numel):
        counts = [max(0, min(start + numel, first + n) - max(start, first)) for first, n in shares]
        owner = min(range(len(shares)), key=lambda rank: (-counts[rank], load[rank]))
        load[owner] += numel
        yield Matrix(weight, start, numel, counts, owner)


def stacks_of(mine: Sequence[Matrix], received: Sequence[int]) -> list[Stack]:
    """The matrices that this rank owns, those of one weight together: ``received`` from each rank in their order."""
    ends = [sum(received[:rank]) for rank in range(len(received))]
    pieces: dict[nn.Parameter, list[Range]] = defaultdict(list)
    shapes: dict[nn.Parameter, tuple[int, ...]] = {}
    for matrix in mine:
        parameter = matrix.weight.parameter
        for rank, count in enumerate(matrix.counts):
            if count:
                pieces[parameter].append((ends[rank], count))
                ends[rank] += count
        *stacked, rows, columns = matrix.weight.held.shape
        owned = sum(numel for _, numel in pieces[parameter]) // (rows * columns)
        shapes[parameter] = (*([owned] if stacked else []), rows, columns)
    return [Stack(parameter, shapes[parameter], joined(pieces[parameter])) for parameter in pieces]
