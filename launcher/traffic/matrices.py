"""Bytes and matrices of an optimizer whose update needs whole matrices, as docs/traffic.md has them."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction

from launcher.traffic.step import FP32_BYTES, Step, Traffic, around_ring
from launcher.traffic.zero import flat_share, optimizer_groups, padded, places_in_flat, replicated

WHAT = "matrices that the update needs whole"


def matrices_traffic(step: Step) -> list[Traffic]:
    """Terms for gathering whole matrices: over tp, and under ZeRO to the rank that owns each matrix and back."""
    if step.parallel.zero == 0:
        return [_over_tp(step, sum(step.weights[name] for name in step.weights if _is_cut_matrix(step, name)))]
    terms, gathered = [], 0
    for axis, n, names in replicated(step):
        rank = step.replica_rank if axis == "replicas" else step.edp_rank
        sent = 0
        for name, counts, owner in _owned(step, n, names):
            sent += sum(counts) - counts[rank] if owner == rank else counts[rank]
            gathered += sum(counts) if owner == rank and _is_cut_matrix(step, name) else 0
        terms.append(Traffic(axis, WHAT, "all-to-all", Fraction(FP32_BYTES * sent)))
    return [*terms, _over_tp(step, gathered)]


def busiest_owner(step: Step) -> Counter[tuple[int, int]]:
    """(rows, columns) -> the number of such matrices that the rank with most work updates.

    Under ZeRO the busiest owner of dense weights and the busiest owner of experts count as one rank: an upper bound.
    """
    shapes = {name: step.layout[name].shape[-2:] for name in step.weights if _is_matrix(step, name)}
    if step.parallel.zero == 0:
        found = Counter[tuple[int, int]]()
        for name, (rows, columns) in shapes.items():
            cuts = step.parallel.tp if _is_cut_matrix(step, name) else 1
            found[rows, columns] += step.weights[name] * cuts // (rows * columns)
        return found
    total = Counter[tuple[int, int]]()
    for _, n, names in replicated(step):
        work, owned = [0] * n, [Counter[tuple[int, int]]() for _ in range(n)]
        for name, _, owner in _owned(step, n, names):
            rows, columns = shapes[name]
            work[owner] += rows * columns * min(rows, columns)
            owned[owner][rows, columns] += 1
        total += owned[work.index(max(work))]
    return total


def _over_tp(step: Step, own_elements: int) -> Traffic:
    """The all-gather over tp of matrices of which each tp rank holds ``own_elements``."""
    whole = FP32_BYTES * own_elements * step.parallel.tp
    return Traffic("tp", WHAT, "all-gather", around_ring("all-gather", whole, step.parallel.tp))


def _is_cut_matrix(step: Step, name: str) -> bool:
    return _is_matrix(step, name) and step.layout[name].axis == "tp"


def _is_matrix(step: Step, name: str) -> bool:
    return step.optimizer.takes_whole(step.tensors[name].weight)


def _owned(step: Step, n: int, names: list[str]) -> Iterator[tuple[str, list[int], int]]:
    """For each matrix: its weight's name, the elements of it that each of ``n`` ranks updates, and its owner's rank."""
    owned = [0] * n
    for name, counts in _matrices(step, n, names):
        owner = min(range(n), key=lambda other: (-counts[other], owned[other], other))
        owned[owner] += sum(counts)
        yield name, counts, owner


def _matrices(step: Step, n: int, names: list[str]) -> Iterator[tuple[str, list[int]]]:
    """For each matrix: its weight's name, and the number of its elements that each of ``n`` ranks updates."""
    for group in optimizer_groups(step, names):
        for name, shares in shares_in_group(step, n, group).items():
            if not _is_matrix(step, name):
                continue
            rows_and_columns = math.prod(step.layout[name].shape[-2:])
            numel = rows_and_columns // (step.parallel.tp if _is_cut_matrix(step, name) else 1)
            for first in range(0, step.weights[name], numel):
                yield name, [max(0, min(first + numel, start + n) - max(first, start)) for start, n in shares]


def shares_in_group(step: Step, n: int, group: Sequence[str]) -> dict[str, list[tuple[int, int]]]:
    """Weight -> for each of ``n`` ranks the first element of it that the rank updates, and the number of elements."""
    found = {}
    for name, begin, end in places_in_flat(step, group):
        if step.parallel.zero == 3:  # the weight alone is cut into even parts
            size = padded(end - begin, n) // n
            bounds = [(rank * size, (rank + 1) * size) for rank in range(n)]
        else:
            parts = (flat_share(step, n, group, rank) for rank in range(n))
            bounds = [(start - begin, stop - begin) for start, stop in parts]
        clipped = [(max(0, start), min(end - begin, stop)) for start, stop in bounds]
        found[name] = [(start, max(0, stop - start)) for start, stop in clipped]
    return found
