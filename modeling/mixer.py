"""The base class of softmax attention and linear attention: the half of a layer that mixes tokens.

Shape letters: B batch, S sequence, D d_model.
"""

from torch import Tensor, nn

from modeling.context import Context
from modeling.kernels.fuse import Fuse, plainly
from modeling.kv_cache import LayerCache
from modeling.positions import ALL_POSITIONS, Positions


class Mixer(nn.Module):
    """The first half of a layer, in which tokens take in information from earlier tokens of their document.

    Tensor parallelism enters through ``positions``; ``fuse`` says how elementwise chains are computed.
    """

    fuse: Fuse
    positions: Positions

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.fuse = plainly
        self.positions = ALL_POSITIONS

    def forward(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """The output of this half (B, S, D).

        With a cache, ``hidden_BSD`` are new tokens that continue the cached sequences.
        """
        raise NotImplementedError
