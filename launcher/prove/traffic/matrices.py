"""What an optimizer sends whose update needs whole matrices. docs/traffic.md says in words what is computed here."""

import math
from collections.abc import Iterator
from fractions import Fraction

from launcher.prove.traffic.step import FP32_BYTES, Step, Traffic, around_ring
from launcher.prove.traffic.zero import flat_share, optimizer_groups, padded, places_in_flat, replicated

WHAT = "matrices that the update needs whole"


def matrices_traffic(step: Step) -> list[Traffic]:
    """Over tp the whole matrices, where this rank computes them; under ZeRO their elements, to owners and back."""
    if step.parallel.zero == 0:
        return [_over_tp(step, sum(step.weights[name] for name in step.weights if _is_cut_matrix(step, name)))]
    terms, gathered = [], 0
    for axis, n, names in replicated(step):
        rank = step.replica_rank if axis == "replicas" else step.edp_rank
        owned, sent = [0] * n, 0
        for name, counts in _matrices(step, n, names):
            owner = min(range(n), key=lambda other: (-counts[other], owned[other], other))
            owned[owner] += sum(counts)
            sent += sum(counts) - counts[rank] if owner == rank else counts[rank]
            gathered += sum(counts) if owner == rank and _is_cut_matrix(step, name) else 0
        terms.append(Traffic(axis, WHAT, "all-to-all", Fraction(FP32_BYTES * sent)))
    return [*terms, _over_tp(step, gathered)]


def _over_tp(step: Step, own_elements: int) -> Traffic:
    """The gather of what each rank of tp has as many elements of."""
    whole = FP32_BYTES * own_elements * step.parallel.tp
    return Traffic("tp", WHAT, "all-gather", around_ring("all-gather", whole, step.parallel.tp))


def _is_cut_matrix(step: Step, name: str) -> bool:
    return _is_matrix(step, name) and step.layout[name].axis == "tp"


def _is_matrix(step: Step, name: str) -> bool:
    return step.optimizer.takes_whole(step.tensors[name].weight)


def _matrices(step: Step, n: int, names: list[str]) -> Iterator[tuple[str, list[int]]]:
    """Each matrix by its weight's name, and how many of its elements each of ``n`` ranks updates."""
    for group in optimizer_groups(step, names):
        for name, begin, end in places_in_flat(step, group):
            if not _is_matrix(step, name):
                continue
            rows_and_columns = math.prod(step.layout[name].shape[-2:])
            numel = rows_and_columns // (step.parallel.tp if _is_cut_matrix(step, name) else 1)
            for first in range(begin, end, numel):
                if step.parallel.zero == 3:  # the weight alone is cut into even parts
                    size = padded(end - begin, n) // n
                    bounds = [(begin + rank * size, begin + (rank + 1) * size) for rank in range(n)]
                else:
                    bounds = [flat_share(step, n, group, rank) for rank in range(n)]
                yield name, [max(0, min(first + numel, stop) - max(first, start)) for start, stop in bounds]
