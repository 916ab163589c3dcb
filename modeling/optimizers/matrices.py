"""The seam at which an optimizer whose update needs whole matrices gets them."""

import math
from collections.abc import Callable, Iterator

from torch import Tensor

AT_ONCE = 1 << 25  # elements of matrices that are whole at the same time, which bounds what an update takes for a while

Function = Callable[[Tensor], Tensor]  # of (..., rows, columns) to the same; each matrix of a stack as if it were alone
Read = Callable[[int, int], Tensor]  # from a first index, so many
Write = Callable[[int, Tensor], None]  # from a first index on


class Matrices:
    """On one device every matrix is whole. ``parallel.matrices`` and ``parallel.zero.matrices`` communicate."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self.at_once = at_once

    def transform(self, weight: Tensor, read: Read, function: Function, write: Write) -> None:
        """Gives ``write`` what ``function`` makes of whole matrices of which ``read`` has elements, a few at a time.

        ``weight`` is what the optimizer updates; both count along its first dimension.
        """
        for start, length in stretches(weight.shape, self.at_once):
            write(start, function(read(start, length)))


def stretches(shape: tuple[int, ...], at_once: int) -> Iterator[tuple[int, int]]:
    """First indices and lengths of a stack (n, ..., rows, columns) of matrices, at least one each; of one, its rows."""
    if len(shape) == 2:
        yield 0, shape[0]
        return
    most = max(1, at_once // math.prod(shape[1:]))
    for start in range(0, shape[0], most):
        yield start, min(most, shape[0] - start)
