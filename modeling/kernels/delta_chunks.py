"""What the gated delta rule (modeling.kernels.gated_delta) makes of each chunk of tokens by itself.

A token's writing is what its value differs from what stands under its key, and that is of the matrix before the chunk
and of all that the chunk's earlier tokens wrote: a triangular system (Yang et al. 2024, arXiv:2412.06464, section 3.3).

Shape letters: B batch, S sequence, G key heads, R value heads of one key head, H = G * R value heads, C channels of a
key, W of a value, N chunks, n tokens of a chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LENGTH_EPS = 1e-6  # added to the squared length of queries and keys, as there


class Chunks(NamedTuple):
    """What the rule makes of each chunk by itself, (B, G, 1 or R, N, ...), fp32: a key head beside its value heads."""

    q: Tensor  # (n, C), of unit length over sqrt(C)
    k: Tensor  # (n, C), of unit length
    v: Tensor  # (n, W)
    writing: Tensor  # (n,)
    is_earlier: Tensor  # bool (n, n), of all chunks: the token itself, too
    between: Tensor  # (n, n): how much of what the second wrote is left at the first; 0 across documents and backwards
    seen: Tensor  # (n, n): between, times q of the first and k of the second
    met: Tensor  # the same with k of both
    enters: Tensor  # (n,): how much of the matrix before the chunk is left at each token
    leaves: Tensor  # (n,): how much of what each token writes is left at the chunk's end
    solved: Tensor  # (n, W + C): what each writes if there is no matrix before; and what it reads of that matrix

    @property
    def asking(self) -> Tensor:
        """(n, C): what each token asks the matrix before the chunk."""
        return self.q * self.enters[..., None]

    @property
    def putting(self) -> Tensor:
        """(n, C): under which key the matrix after the chunk has what each token writes."""
        return self.k * self.leaves[..., None]

    @property
    def stays(self) -> Tensor:
        """(1, 1): how much of the matrix before the chunk is left after it."""
        return self.enters[..., -1, None, None]


def chunks(
    q_BSGC: Tensor,
    k_BSGC: Tensor,
    v_BSHW: Tensor,
    fading_BSH: Tensor,
    writing_BSH: Tensor,
    positions_BS: Tensor,
    chunk: int,
) -> Chunks:
    """Of the rule's arguments, as of ``gated_delta.continued``: what fills the last chunk writes and fades nothing."""
    seq_len, n_keys, n_channels = k_BSGC.shape[1:]
    n = min(chunk, seq_len)
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
    met = k @ k.transpose(-1, -2) * between
    enters = faded.exp() * (document == 0)
    leaves = (faded[..., -1:] - faded).exp() * (document == document[..., -1:])
    right = torch.cat([v * writing[..., None], k * (writing * enters)[..., None]], dim=-1)
    system = met * writing[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    return Chunks(q, k, v, writing, is_earlier, between, seen, met, enters, leaves, solved)


def matrices(made: Chunks, state_BHCW: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The matrix before each chunk and after the last (B * H, N + 1, C, W); what each token writes (B, G, R, N, n, W).

    ``state_BHCW``: the matrices before the first chunk; None: zeros.
    """
    width = made.v.shape[-1]
    written, read = made.solved.flatten(0, 2).split([width, made.k.shape[-1]], dim=-1)
    putting, stays = made.putting.flatten(0, 2).mT, made.stays.flatten(0, 2)
    n_heads, n_chunks = written.shape[:2]
    states, new = written.new_empty(n_heads, n_chunks + 1, *putting.shape[2:3], width), torch.empty_like(written)
    states[:, 0] = 0 if state_BHCW is None else state_BHCW.flatten(0, 1)
    for here in range(n_chunks):
        before, after = states[:, here], states[:, here + 1]
        torch.baddbmm(written[:, here], read[:, here], before, alpha=-1, out=new[:, here])
        torch.mul(before, stays[:, here], out=after).baddbmm_(putting[:, here], new[:, here])
    return states, new.view(*made.solved.shape[:-1], width)


def chunks_of(heads_BSHX: Tensor, n: int, n_keys: int) -> Tensor:
    """(B, G, R, N, n, X): the heads of each key head, in chunks of n tokens, the last one filled with zeros.

    Contiguous: whatever is made of tensors that lie otherwise lies as they do, and takes thrice the time on a CPU.
    """
    padded_BSHX = F.pad(heads_BSHX, (0, 0, 0, 0, 0, -heads_BSHX.shape[1] % n))
    return padded_BSHX.unflatten(2, (n_keys, -1)).unflatten(1, (-1, n)).permute(0, 3, 4, 1, 2, 5).contiguous()


def in_rows(by_chunk: Tensor, seq_len: int) -> Tensor:
    """What ``chunks_of`` gives, or a number for each token as (..., n, 1), back as (B, S, heads, X)."""
    return by_chunk.flatten(3, 4).flatten(1, 2)[:, :, :seq_len].transpose(1, 2)


def unit(heads: Tensor) -> Tensor:
    """Vectors of the last dim, made of unit length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + LENGTH_EPS)
