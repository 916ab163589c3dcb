"""Linear attention under context parallelism: by all-to-all over heads, whichever way softmax attention communicates.

A head's state matrix is passed from each token to the next, so a rank that held only a part of the positions would wait
for the rank before it. Shape letters: B batch, S positions held, N all positions (cp * S), H value heads, G key heads,
C channels of a head's query and key, W of its value, K taps; X all numbers of one rank's heads.
"""

import torch
from torch import Tensor

from modeling.context import Context
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.gated_delta import RuleSizes
from modeling.linear_attention import HeadWeights, Projected, mix
from parallel.context_parallel.context import HeldContext
from parallel.context_parallel.ulysses import heads_to_positions, positions_to_heads
from parallel.mesh import Axis


def ulysses_mix(
    projected: Projected,
    weights: HeadWeights,
    context: Context,
    fuse: Fuse = plainly,
    *,
    axis: Axis,
    sizes: RuleSizes | None = None,
) -> Tensor:
    """Linear attention's output (B, S, H, W) at the held positions. All ranks of ``axis`` call it.

    Before and after, each rank holds all heads at its own positions; in between, H / cp value heads and their key heads
    at all positions, on which ``modeling.linear_attention.mix`` runs. cp divides H, and it divides G or is a multiple
    of G; in the latter case each key head goes to the cp / G ranks that need it. Each rank computes the weights'
    gradients for its own heads, at all positions; they become complete when gradients are summed over cp.

    Bytes sent by each rank, E bytes an element: B * S * (2 max(G, cp) C + H (2 W + 2)) * E * (cp - 1) / cp forward, and
    as many backward.
    """
    assert isinstance(context, HeldContext)
    n_keys, n_values, cp = projected.k_BSGC.shape[2], projected.v_BSHW.shape[2], axis.degree
    assert n_values % cp == 0 and (n_keys % cp == 0 or cp % n_keys == 0), (n_keys, n_values, cp)
    q_BSGC, k_BSGC, v_BSHW, a_BSH, b_BSH = projected
    q_taps_XK, k_taps_XK, v_taps_XK, log_rates_H, step_biases_H = weights
    if n_keys < cp:
        times = cp // n_keys
        q_BSGC, k_BSGC = (heads.repeat_interleave(times, dim=2) for heads in (q_BSGC, k_BSGC))
        q_taps_XK, k_taps_XK = (repeated(taps_XK, n_keys, times) for taps_XK in (q_taps_XK, k_taps_XK))
    parts = [heads.unflatten(2, (cp, -1)) for heads in (q_BSGC, k_BSGC, v_BSHW, a_BSH, b_BSH)]
    shapes = [part.shape[3:] for part in parts]
    arrived_BNX = positions_to_heads(torch.cat([part.flatten(3) for part in parts], dim=3), axis)
    numbers = arrived_BNX.split([shape.numel() for shape in shapes], dim=2)
    here = Projected(*(part.unflatten(2, shape) for part, shape in zip(numbers, shapes, strict=True)))
    own = (each.chunk(cp)[axis.rank] for each in (q_taps_XK, k_taps_XK, v_taps_XK, log_rates_H, step_biases_H))
    return heads_to_positions(mix(here, HeadWeights(*own), context.whole, fuse, sizes=sizes), axis)


def repeated(taps_XK: Tensor, n_heads: int, times: int) -> Tensor:
    """The taps with those of each of ``n_heads`` heads repeated ``times`` times in a row."""
    return taps_XK.unflatten(0, (n_heads, -1)).repeat_interleave(times, dim=0).flatten(0, 1)
