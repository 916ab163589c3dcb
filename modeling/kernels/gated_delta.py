r"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464, sections 3.1 and 3.3), within documents, in chunks.

A head's state, the matrix S (C x W), goes from token to token, and is zero before a document's first token:

    S_t = exp(g_t) (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T,      o_t = S_t^T q_t / sqrt(C)

q and k have unit length; g <= 0 is the logarithm of the state's decay, and b in (0, 1) is the share of the value under
a key that is replaced. In a chunk of n tokens, one triangular system gives what each token writes (the WY form,
modeling.kernels.delta_chunks), so that only the state between chunks is computed one after another.

Shape letters: B batch, S sequence, G key heads, R value heads of one key head, H = G * R value heads, C channels of a
key, W of a value, N chunks, n tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling.context import Context
from modeling.kernels.by_rows import PIECE_BYTES, pieces
from modeling.kernels.delta_chunks import chunks, in_rows, matrices
from modeling.kernels.delta_gradients import gradients_by_chunks
from modeling.kernels.fused_delta import CHUNK, fused_delta, takes_fused
from modeling.kernels.rerun import Cuts, rerun


class RuleSizes(NamedTuple):
    """The sizes of the rule's chunks and pieces, which change its values only by rounding."""

    chunk: int = CHUNK  # tokens of one triangular system
    # on a CPU, for one piece of heads: the size of a tensor with a number for each pair of a chunk's tokens
    piece_bytes: int = PIECE_BYTES


def gated_delta(
    q_BSGC: Tensor,
    k_BSGC: Tensor,
    v_BSHW: Tensor,
    fading_BSH: Tensor,
    writing_BSH: Tensor,
    context: Context,
    sizes: RuleSizes | None = None,
) -> Tensor:
    """Each token's o (B, S, H, W), in the dtype of ``v_BSHW``. ``fading_BSH`` is g, ``writing_BSH`` is b, both fp32.

    Consecutive value heads share a key head. Computed in fp32; only the inputs are saved for the backward pass
    (modeling.kernels.delta_gradients). On CUDA in 16 bits flash-linear-attention's kernels compute it where they are
    installed (``fused_delta``). On a CPU it is computed for some heads of one sequence at a time.
    """
    sizes = sizes or RuleSizes()
    given = (q_BSGC, k_BSGC, v_BSHW, fading_BSH, writing_BSH)
    if takes_fused(v_BSHW):
        return fused_delta(*given, context)
    cuts = cuts_of(k_BSGC, v_BSHW, sizes) if v_BSHW.device.type == "cpu" else None
    return rerun(by_chunks, *given, context.positions_BS, sizes.chunk, cuts=cuts, backward=gradients_by_chunks)


def cuts_of(k_BSGC: Tensor, v_BSHW: Tensor, sizes: RuleSizes) -> Cuts:
    """Pieces of one sequence's key heads, with their value heads, so that a tensor of squares fits into piece_bytes."""
    batch, seq_len, n_keys, _ = k_BSGC.shape
    shared = v_BSHW.shape[2] // n_keys
    n_heads = max(1, sizes.piece_bytes // (4 * shared * seq_len * min(sizes.chunk, seq_len)))
    found = []
    for row in range(batch):
        for heads in pieces(n_keys, n_heads):
            keys = slice(row, row + 1), slice(None), heads
            values = slice(row, row + 1), slice(None), slice(heads.start * shared, heads.stop * shared)
            found.append((keys, keys, values, values, values, slice(row, row + 1)))
    return Cuts(found, shaped_as=2)


def by_chunks(*given: Any) -> Tensor:
    """The rule's output by torch's operations. Its arguments are those of ``continued`` after the state."""
    out_BSHW, _ = continued(None, *given)
    return out_BSHW


def continued(
    state_BHCW: Tensor | None,
    q_BSGC: Tensor,
    k_BSGC: Tensor,
    v_BSHW: Tensor,
    fading_BSH: Tensor,
    writing_BSH: Tensor,
    positions_BS: Tensor,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """The rule over tokens that continue a sequence: o (B, S, H, W), and the state (B, H, C, W), fp32, at its end.

    ``state_BHCW`` is the state at the end of the tokens before; None means that there were none.

    Not differentiable, since memory is written in place; ``gated_delta`` is.
    """
    made = chunks(q_BSGC, k_BSGC, v_BSHW, fading_BSH, writing_BSH, positions_BS, chunk)
    states, new = matrices(made, state_BHCW)
    out = torch.baddbmm((made.seen @ new).flatten(0, 3), made.asking.flatten(0, 3), states[:, :-1].flatten(0, 1))
    return in_rows(out.view_as(new), v_BSHW.shape[1]).to(v_BSHW.dtype), states[:, -1].unflatten(0, (len(v_BSHW), -1))
