"""The seam at which an optimizer whose update needs whole matrices gets them."""

from collections.abc import Callable

from torch import Tensor


class Matrices:
    """On one device every matrix is whole. ``parallel.matrices`` and ``parallel.zero.matrices`` communicate."""

    def of_whole(self, weight: Tensor, part: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """``function`` of the whole matrices of which ``part`` has elements; of its result, those that ``part`` has.

        ``weight`` is what the optimizer updates, and ``part`` is laid out as it is. ``function`` takes and returns
        (..., rows, columns), and treats each matrix of a stack as if it were alone.
        """
        return function(part)
