"""Whole matrices for optimizers that need them (Muon), under ZeRO 1 to 3, whose partitions may cut through a matrix.

Each matrix has one owner among the ranks that share its weight's state. The other ranks send the owner their elements
of the matrix; it computes, and sends each rank its elements of the result. So each matrix is computed once (by all
ranks of tp, if they cut it), and a matrix that lies wholly on one rank is not sent: with the long partitions of ZeRO 1
and 2, these are most.

This is done in rounds of a bounded size. Rounds with sends come first, so that no rank waits while others compute
matrices of their own.
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

Flat = tuple[Tensor, Sequence[tuple[HeldWeight, Share | None]]]  # an updated tensor, and the weights' shares in it
Range = tuple[int, int]  # a first element, and the number of elements


@dataclass(frozen=True)
class Matrix:
    """One matrix of a weight: elements [start, start + numel) of the flattened part with which this rank computes."""

    weight: HeldWeight
    start: int
    numel: int
    counts: list[int]  # the number of its elements that each rank of the axis updates: consecutive ones, in rank order
    owner: int  # the position on the axis of the rank that computes with the whole matrix

    @property
    def stays(self) -> bool:
        """Whether its owner has all of its elements, so that nothing is sent."""
        return self.counts[self.owner] == self.numel


@dataclass(frozen=True)
class Stack:
    """Matrices of one weight that this rank owns, with the ranges of their elements in what it received, in order."""

    weight: nn.Parameter
    shape: tuple[int, ...]
    pieces: list[Range]


@dataclass(frozen=True)
class Round:
    """The plan of one round: some matrices of one flat tensor, sent to their owners, and the results sent back."""

    axis: Axis
    own: list[Range]  # this rank's elements of the matrices in the flat tensor: by owner, then in the weights' order
    sent: list[int]  # the number of elements to each rank of the axis
    received: list[int]  # the number of elements from each rank of the axis
    stacks: list[Stack]  # the matrices that this rank owns
    travels: bool  # whether any matrix does not lie wholly on its owner


class DealtMatrices(Matrices):
    """Applies an optimizer's function to whole matrices: sends elements to each matrix's owner, and results back."""

    def __init__(self, flats: Sequence[Flat], cut: CutMatrices) -> None:
        """Plans all rounds. All ranks call it, with the tensors that their optimizers update, in the same order."""
        super().__init__(cut.at_once)
        self.cut = cut
        loads: dict[tuple[int, ...], list[int]] = defaultdict(list)  # elements that each rank of an axis owns so far
        self.rounds = {flat: plan_rounds(held, loads, self.at_once) for flat, held in flats}

    def transform(self, weight: Tensor, read: Read, function: Function, write: Write) -> None:
        """Writes ``function`` of the whole matrices of the flat tensor ``weight``; its padding is not written.

        Before, ``read`` has this rank's elements; after, ``write`` has been given the results for the same elements.
        All ranks that share the tensor's state call it, and all of tp. Bytes: those of the elements that leave this
        rank, on the way to owners and on the way back. Raises ValueError for a tensor whose rule does not take whole
        matrices.
        """
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
    """The rounds of one flat tensor. All ranks of its axis call it.

    ``loads``: the elements that each rank of an axis owns so far, by the axis's ranks; this adds to it. Rounds with
    sends are the same on all ranks of the axis.
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
    """The matrices in groups, such that no rank sends or owns more than ``at_once`` elements of a group.

    Each group has at least one matrix; a single one may exceed that.
    """
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
    """The plan of one round. ``offsets``: where in the flat tensor a weight's first element lies, or would lie."""
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
    """The same elements in the same order, with neighbouring ranges joined."""
    found: list[Range] = []
    for start, numel in ranges:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + numel)
        else:
            found.append((start, numel))
    return found


def cat(parts: list[Tensor]) -> Tensor:
    """The parts concatenated; a single part is returned as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def shares_of_all(held: Sequence[tuple[HeldWeight, Share | None]], axis: Axis) -> list[list[Range]]:
    """The range of each weight's part that each rank of the axis updates, by rank. All ranks of the axis call it.

    The ranges are all-gathered: each rank has 16 bytes a weight.
    """
    own = [(0, 0) if share is None else (share.start, share.numel) for _, share in held]
    return gather_parts(torch.tensor([own], device=held[0][0].parameter.device), 0, axis).tolist()


def matrices_of(weight: HeldWeight, shares: Sequence[Range], load: list[int]) -> Iterator[Matrix]:
    """The matrices that a weight's part consists of, each owned by the rank that has most of its elements.

    Among equals the owner is the rank that owns the fewest elements so far (``load``, to which this adds), then the
    first. ``shares``: the range that each rank updates.
    """
    numel = math.prod(weight.held.shape[-2:])
    for start in range(0, math.prod(weight.held.shape), numel):
        counts = [max(0, min(start + numel, first + n) - max(start, first)) for first, n in shares]
        owner = min(range(len(shares)), key=lambda rank: (-counts[rank], load[rank]))
        load[owner] += numel
        yield Matrix(weight, start, numel, counts, owner)


def stacks_of(mine: Sequence[Matrix], received: Sequence[int]) -> list[Stack]:
    """The matrices that this rank owns, in one Stack for each weight.

    ``received``: the number of elements from each rank, which arrive by rank and within a rank in the matrices' order.
    """
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
