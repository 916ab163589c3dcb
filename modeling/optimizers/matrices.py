"""How an optimizer whose update needs whole matrices gets them; here for one device."""

import math
from collections.abc import Callable, Iterator

from torch import Tensor

AT_ONCE = 1 << 25  # elements of matrices that are whole at the same time: bounds the memory that an update needs

Function = Callable[[Tensor], Tensor]  # (..., rows, columns) -> the same shape, each matrix of a stack by itself
Read = Callable[[int, int], Tensor]  # (first index, how many) -> these entries of the first dim
Write = Callable[[int, Tensor], None]  # (first index, entries): writes them from that index on


class Matrices:
    """Whole matrices on one device, where every matrix is whole already.

    ``parallel.matrices`` and ``parallel.zero.matrices`` gather them by communication.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self.at_once = at_once

    def transform(self, weight: Tensor, read: Read, function: Function, write: Write) -> None:
        """Applies ``function`` to whole matrices from ``read``, and passes the results to ``write``, a few at a time.

        ``weight`` is the tensor that the optimizer updates; ``read`` and ``write`` count along its first dim.
        """
        for start, length in stretches(weight.shape, self.at_once):
            write(start, function(read(start, length)))


def stretches(shape: tuple[int, ...], at_once: int) -> Iterator[tuple[int, int]]:
    """First indices and lengths of runs of a stack (n, ..., rows, columns), with at least one matrix each.

    A run has at most ``at_once`` elements if it has several matrices. A single matrix is one run of all its rows.
    """
    if len(shape) == 2:
        yield 0, shape[0]
        return
    most = max(1, at_once // math.prod(shape[1:]))
    for start in range(0, shape[0], most):
        yield start, min(most, shape[0] - start)
