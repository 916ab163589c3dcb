"""The short causal convolution of linear attention, which does not cross from one document into the next.

Shape letters: B batch, S sequence, X channels, K tokens that one sees.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.kernels.fuse import never_compiled
from modeling.kernels.rerun import rerun


@never_compiled
def short_convolution(inputs_BSX: Tensor, positions_BS: Tensor, taps_XK: Tensor) -> Tensor:
    """The silu of each channel's sum over the token itself (the last tap) and the K - 1 before it of its document.

    Of the shape and dtype of ``inputs_BSX``, computed in fp32. ``positions_BS``: each token's place in its document.
    Keeps its inputs for the backward pass, and nothing else.
    """
    return rerun(plain_convolution, inputs_BSX, positions_BS, taps_XK)


def plain_convolution(inputs_BSX: Tensor, positions_BS: Tensor, taps_XK: Tensor) -> Tensor:
    """``short_convolution``, of which autograd keeps every step."""
    wide_BSX, taps_XK = inputs_BSX.float(), taps_XK.float()
    sum_BSX = wide_BSX * taps_XK[:, -1]
    for back in range(1, min(taps_XK.shape[1], inputs_BSX.shape[1])):
        is_seen_BS = positions_BS[:, back:] >= back
        earlier_BSX = wide_BSX[:, :-back] * is_seen_BS[..., None] * taps_XK[:, -1 - back]
        sum_BSX = sum_BSX + F.pad(earlier_BSX, (0, 0, back, 0))
    return F.silu(sum_BSX).to(inputs_BSX.dtype)


def continued_convolution(
    earlier_BKX: Tensor | None, inputs_BSX: Tensor, positions_BS: Tensor, taps_XK: Tensor
) -> tuple[Tensor, Tensor]:
    """The convolution of tokens that continue a sequence, and what the next ones need: its last K - 1 inputs.

    ``earlier_BKX``: what this function gave at the end of the tokens before; None: there were none.
    """
    n_kept = taps_XK.shape[1] - 1
    if earlier_BKX is None:
        earlier_BKX = inputs_BSX.new_zeros(len(inputs_BSX), n_kept, inputs_BSX.shape[2])
    whole_BSX = torch.cat([earlier_BKX, inputs_BSX], dim=1)
    places_BS = F.pad(positions_BS, (n_kept, 0))
    out_BSX = plain_convolution(whole_BSX, places_BS, taps_XK)[:, n_kept:]
    return out_BSX, whole_BSX[:, whole_BSX.shape[1] - n_kept :].clone()
