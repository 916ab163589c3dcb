"""Limits on the width of attention's heads, and padding of heads to the width that a kernel needs.

Shape letters: C channels of a head.
"""

from torch import Tensor
from torch.nn import functional as F

FLASH_CHANNELS = 256  # of a head, at most
FLASH_UNIT = 8  # channels: 16 bytes in 16 bits


def widened(heads: Tensor, n_channels: int) -> Tensor:
    """Queries, keys or values filled up with zeros to ``n_channels``.

    Attention's output is then zero in the channels that were added to the values.
    """
    missing = n_channels - heads.shape[-1]
    return F.pad(heads, (0, missing)) if missing else heads
