"""The seam at which ranks share the positions of a sequence between layers.

Shape letters: B batch, S sequence, D d_model.

A block whose weights an axis cuts (attention, a dense feed-forward layer) computes on all positions with its part of
the heads or channels: it begins with ``gather`` and ends with ``scatter_sum``.
"""

from torch import Tensor


class Positions:
    """One device: a block sees all positions, and what it computes is the whole sum.

    Of what its heads or channels are cut into, ``degree`` equal parts, it has part number ``rank``.
    """

    rank = 0
    degree = 1

    def gather(self, hidden_BSD: Tensor) -> Tensor:
        """All positions, from those that are held between layers."""
        return hidden_BSD

    def scatter_sum(self, partial_BSD: Tensor) -> Tensor:
        """The sum over the ranks that share the weights, at the positions that are held between layers."""
        return partial_BSD


class Unsummed(Positions):
    """``positions``, whose user leaves out the sum: the summands are its output."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions
        self.rank, self.degree = positions.rank, positions.degree

    def gather(self, hidden_BSD: Tensor) -> Tensor:
        """As ``positions`` has it."""
        return self.positions.gather(hidden_BSD)


ALL_POSITIONS = Positions()
