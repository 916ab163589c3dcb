"""How wide attention's heads may be, and heads filled up with zeros for kernels that want them wider.

Shape letters: C channels of a head.
"""

from torch import Tensor
from torch.nn import functional as F

FLASH_CHANNELS = 256  # of a head, at most
FLASH_UNIT = 8  # channels: 16 bytes in 16 bits


def widened(heads: Tensor, n_channels: int) -> Tensor:
    """Queries, keys or values with ``n_channels``, filled up with zeros, for code that wants all equally wide.

    Attention's output then has zeros in the channels that values were given.
    """
    missing = n_channels - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads
