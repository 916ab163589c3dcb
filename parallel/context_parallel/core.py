"""Attention cores for context parallelism, which communicate over cp, with the signature of the one-device cores."""

from functools import partial
from typing import Literal, assert_never

from modeling.attention import AttentionCore
from modeling.kernels.gated_delta import RuleSizes
from modeling.kernels.varlen import PiecesKernel
from modeling.linear_attention import LinearCore
from modeling.pieces import QUERY_BLOCK
from parallel.context_parallel.linear import ulysses_mix
from parallel.context_parallel.plan import TILE
from parallel.context_parallel.ring import ring_attend
from parallel.context_parallel.ulysses import ulysses_attend
from parallel.mesh import Axis


def make_core(
    kind: Literal["ulysses", "ring"],
    axis: Axis,
    tile: int = TILE,
    block: int = QUERY_BLOCK,
    kernel: PiecesKernel | None = None,
) -> AttentionCore:
    """An attention core over the cp axis (degree above 1), for ``modeling.attention.Attention.core``.

    The core takes the held positions' queries, keys and values and a ``HeldContext``, and returns attention's output at
    the held positions. All ranks of the axis call it, layer by layer, forward and backward. ``tile``: the ring's number
    of queries, and of keys, in one kernel call. ``block``: queries of one kernel call of Ulysses' attention on CPUs.
    ``kernel``: the ring's kernel for pieces of documents on any device; None: FlashAttention where it can.
    """
    assert axis.degree > 1
    match kind:
        case "ulysses":
            return partial(ulysses_attend, axis=axis, block=block)
        case "ring":
            return partial(ring_attend, axis=axis, tile=tile, kernel=kernel)
        case _:
            assert_never(kind)


def make_linear_core(axis: Axis, sizes: RuleSizes | None = None) -> LinearCore:
    """A core over the cp axis (degree above 1), for ``modeling.linear_attention.LinearAttention.core``.

    All ranks of the axis call the core, layer by layer, forward and backward.
    """
    assert axis.degree > 1
    return partial(ulysses_mix, axis=axis, sizes=sizes)
