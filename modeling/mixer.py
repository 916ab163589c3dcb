"""What the two kinds of attention have in common for the rest of the house.

Shape letters: B batch, S sequence, D d_model.
"""

from torch import Tensor, nn

from modeling.context import Context
from modeling.kernels.fuse import Fuse, plainly
from modeling.kv_cache import LayerCache
from modeling.positions import ALL_POSITIONS, Positions


class Mixer(nn.Module):
    """The first half of a layer, in which tokens of a document learn of those before them.

    ``positions`` is tensor parallelism's seam, ``fuse`` that of chains of elementwise work.
    """

    fuse: Fuse
    positions: Positions

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.fuse = plainly
        self.positions = ALL_POSITIONS

    def forward(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """What the half puts out (B, S, D). With a cache, ``hidden_BSD`` continues the sequences that it holds."""
        raise NotImplementedError
