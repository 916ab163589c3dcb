r"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464, sections 3.1 and 3.3), within documents, in chunks.

A head's matrix S (C x W) goes from token to token, and at a document's first token begins with zeros:

    S_t = exp(g_t) (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T,      o_t = S_t^T q_t / sqrt(C)

q and k have unit length; g <= 0 lets the matrix fade, and b in (0, 1) is how much of what stands under a key is
replaced. In a chunk of n tokens what each one writes follows from those before it in the chunk by one triangular system
(the WY form), so that only the matrix between chunks is computed one after another.

Shape letters: B batch, S sequence, G key heads, R value heads of one key head, H = G * R value heads, C channels of a
key, W of a value, N chunks, n tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.context import Context
from modeling.kernels.by_rows import PIECE_BYTES, pieces
from modeling.kernels.fused_delta import CHUNK, fused_delta, takes_fused
from modeling.kernels.rerun import Cuts, rerun

LENGTH_EPS = 1e-6  # added to the squared length of queries and keys, as there


class RuleSizes(NamedTuple):
    """How the rule is cut, which changes no value but by rounding."""

    chunk: int = CHUNK  # tokens of one triangular system
    piece_bytes: int = PIECE_BYTES  # on a CPU: of a tensor of a number for each two tokens of a chunk, computed at once


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

    Value heads share keys in order. Computed in fp32; keeps its inputs for the backward pass, and nothing else. On CUDA
    in 16 bits flash-linear-attention's kernels do it where they are installed (``fused_delta``); on a CPU some heads of
    a sequence at a time.
    """
    sizes = sizes or RuleSizes()
    given = (q_BSGC, k_BSGC, v_BSHW, fading_BSH, writing_BSH)
    if takes_fused(v_BSHW):
        return fused_delta(*given, context)
    cuts = cuts_of(k_BSGC, v_BSHW, sizes) if v_BSHW.device.type == "cpu" else None
    return rerun(by_chunks, *given, context.positions_BS, sizes.chunk, cuts=cuts)


def cuts_of(k_BSGC: Tensor, v_BSHW: Tensor, sizes: RuleSizes) -> Cuts:
    """Pieces of one sequence: so many key heads, and their value heads, that a tensor of squares fits piece_bytes."""
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
    """``gated_delta`` in torch's operations, of which autograd keeps every step. Arguments as of ``continued``."""
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
    """The rule over tokens that continue a sequence: o (B, S, H, W), and the matrices (B, H, C, W), fp32, at its end.

    ``state_BHCW``: the matrices at the end of the tokens before; None: there were none.
    """
    batch, seq_len, n_keys, n_channels = k_BSGC.shape
    n_values, width = v_BSHW.shape[2:]
    n = min(chunk, seq_len)
    # (B, G, 1 or R, N, n, ...): a key head beside the value heads that share it; what fills the last chunk writes
    # nothing, and fades nothing.
    q, k = (chunks_of(unit(each.float()), n, n_keys) for each in (q_BSGC, k_BSGC))
    q = q * n_channels**-0.5
    v = chunks_of(v_BSHW.float(), n, n_keys)
    fading, writing = (chunks_of(each[..., None], n, n_keys)[..., 0] for each in (fading_BSH, writing_BSH))
    firsts_BS = F.pad(positions_BS == 0, (0, -seq_len % n))
    document = firsts_BS.unflatten(1, (-1, n)).long().cumsum(-1)[:, None, None]  # 0: of the chunk before
    is_earlier = torch.ones(n, n, dtype=torch.bool, device=v.device).tril()
    # no torch.cumsum: it has no fixed order on CUDA, and is refused there where one is asked for
    faded = fading @ is_earlier.T.float()
    meets = is_earlier & (document[..., :, None] == document[..., None, :])
    between = (faded[..., :, None] - faded[..., None, :]).masked_fill(~meets, float("-inf")).exp()
    seen = q @ k.transpose(-1, -2) * between
    met = k @ k.transpose(-1, -2) * between * writing[..., None]
    enters = faded.exp() * (document == 0)  # how much of the matrix before the chunk is there at each token
    leaves = (faded[..., -1:] - faded).exp() * (document == document[..., -1:])
    right = torch.cat([v * writing[..., None], k * (writing * enters)[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(met, right, upper=False, unitriangular=True)
    written, read = solved.split([width, n_channels], dim=-1)
    asking, putting = q * enters[..., None], (k * leaves[..., None]).transpose(-1, -2)

    if state_BHCW is None:
        state = v.new_zeros(batch, n_keys, n_values // n_keys, n_channels, width)
    else:
        state = state_BHCW.unflatten(1, (n_keys, -1))
    stays = enters[..., -1, None, None]
    by_chunk = zip(*(each.unbind(3) for each in (written, read, asking, seen, putting, stays)), strict=True)
    outs = []
    for written_here, read_here, asking_here, seen_here, putting_here, stays_here in by_chunk:
        new = written_here - read_here @ state
        outs.append(asking_here @ state + seen_here @ new)
        state = state * stays_here + putting_here @ new
    out_BHSW = torch.stack(outs, dim=3).flatten(3, 4).flatten(1, 2)[:, :, :seq_len]
    return out_BHSW.transpose(1, 2).to(v_BSHW.dtype), state.flatten(1, 2)


def chunks_of(heads_BSHX: Tensor, n: int, n_keys: int) -> Tensor:
    """(B, G, R, N, n, X): the heads of each key head, in chunks of n tokens, the last one filled with zeros.

    Contiguous: whatever is made of tensors that lie otherwise lies as they do, and takes thrice the time on a CPU.
    """
    padded_BSHX = F.pad(heads_BSHX, (0, 0, 0, 0, 0, -heads_BSHX.shape[1] % n))
    return padded_BSHX.unflatten(2, (n_keys, -1)).unflatten(1, (-1, n)).permute(0, 3, 4, 1, 2, 5).contiguous()


def unit(heads: Tensor) -> Tensor:
    """Vectors of the last dim, made of unit length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + LENGTH_EPS)
