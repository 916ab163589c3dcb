"""How a block gathers a sequence's positions and sums its output, where ranks share them (tensor parallelism).

A block whose weights are sharded (attention, a dense feed-forward layer) computes on all positions with its part of the
heads or channels: it begins with ``gather`` and ends with ``scatter_sum``. The version here is for one device.

Shape letters: B batch, S sequence, D d_model.
"""

from torch import Tensor


class Positions:
    """One device: a block is given all positions, and its output is already the whole sum.

    ``rank`` and ``degree`` say which of how many equal parts of the heads or channels the block has.
    """

    rank = 0
    degree = 1

    def gather(self, hidden_BSD: Tensor) -> Tensor:
        """The hidden states at all positions, from those at the positions that this rank holds between layers."""
        return hidden_BSD

    def scatter_sum(self, partial_BSD: Tensor) -> Tensor:
        """The sum over the ranks that share the weights, at the positions that this rank holds between layers."""
        return partial_BSD


class Unsummed(Positions):
    """``positions`` without the sum: the block's output is this rank's summand, which the caller sums later."""

    def __init__(self, positions: Positions) -> None:
        self.positions = positions
        self.rank, self.degree = positions.rank, positions.degree

    def gather(self, hidden_BSD: Tensor) -> Tensor:
        """The hidden states at all positions, gathered by ``positions``."""
        return self.positions.gather(hidden_BSD)


ALL_POSITIONS = Positions()
