"""Embeddings that two pp ranks hold: the first stage's, and a copy for the head or for multi-token prediction.

Both are one logical weight, so both get the sum of both gradients.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Axis


def add_other_copy(gradient: Tensor, axis: Axis, other: int) -> None:
    """Adds the other copy's gradient to this one's, in place. The ranks of the first and of the last stage call it.

    Before: each holds the gradient of its copy. After: both hold the sum, bit for bit the same. ``axis`` is pp, and
    ``other`` the position there of the rank with the other copy. Each sends the gradient's bytes once.
    """
    theirs = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    peer = axis.ranks[other]
    send = dist.P2POp(dist.isend, gradient.contiguous(), peer, axis.group)
    receive = dist.P2POp(dist.irecv, theirs, peer, axis.group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    gradient += theirs
