"""The part of the gated delta rule (modeling.kernels.gated_delta) that is computed within each chunk of tokens.

A token writes the difference between its value and what the state holds for its key. The state has what was there
before the chunk and what the chunk's earlier tokens wrote, so that a chunk is a triangular system (Yang et al. 2024,
arXiv:2412.06464, section 3.3).

Shape letters: B batch, S sequence, G key heads, R value heads of one key head, H = G * R value heads, C channels of a
key, W of a value, N chunks, n tokens of a chunk.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LENGTH_EPS = 1e-6  # added to the squared length of queries and keys, as in the authors' code


class Chunks(NamedTuple):
    """What is computed within each chunk, (B, G, 1 or R, N, ...), fp32.

    Tensors of a key head have 1 in place of R, its number of value heads.
    """

    q: Tensor  # (n, C), of unit length over sqrt(C)
    k: Tensor  # (n, C), of unit length
    v: Tensor  # (n, W)
    writing: Tensor  # (n,)
    is_earlier: Tensor  # bool (n, n), the same for all chunks: the second token is not after the first
    between: Tensor  # (n, n): the share of the second's writing left at the first; 0 if later or in another document
    seen: Tensor  # (n, n): between, times the product of the first's q and the second's k
    met: Tensor  # (n, n): between, times the product of both tokens' k
    enters: Tensor  # (n,): the share of the state before the chunk that is left at each token
    leaves: Tensor  # (n,): the share of each token's writing that is left at the chunk's end
    solved: Tensor  # (n, W + C): what each token writes if the state before is zero; the key it reads that state with

    @property
    def asking(self) -> Tensor:
        """(n, C): the query with which each token reads the state before the chunk."""
        return self.q * self.enters[..., None]

    @property
    def putting(self) -> Tensor:
        """(n, C): the key under which each token's writing stands in the state after the chunk."""
        return self.k * self.leaves[..., None]

    @property
    def stays(self) -> Tensor:
        """(1, 1): the share of the state before the chunk that is left after it."""
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
    """What is computed within each chunk, from the arguments of the rule (``gated_delta.continued``).

    The padding of the last chunk writes nothing and lets nothing decay.
    """
    seq_len, n_keys, n_channels = k_BSGC.shape[1:]
    n = min(chunk, seq_len)
    q, k = (chunks_of(unit(each.float()), n, n_keys) for each in (q_BSGC, k_BSGC))
    q = q * n_channels**-0.5
    v = chunks_of(v_BSHW.float(), n, n_keys)
    fading, writing = (chunks_of(each[..., None], n, n_keys)[..., 0] for each in (fading_BSH, writing_BSH))
    firsts_BS = F.pad(positions_BS == 0, (0, -seq_len % n))
    document = firsts_BS.unflatten(1, (-1, n)).long().cumsum(-1)[:, None, None]  # 0: of the chunk before
    is_earlier = torch.ones(n, n, dtype=torch.bool, device=v.device).tril()
    # Not torch.cumsum: on CUDA it is not deterministic, and raises an error where determinism is asked for.
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
    """The state before each chunk and after the last (B * H, N + 1, C, W); and each token's writing (B, G, R, N, n, W).

    ``state_BHCW`` is the state before the first chunk; None means zeros.
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
    """(B, G, R, N, n, X): the heads of each key head in chunks of n tokens, the last one filled up with zeros.

    Contiguous, since results would inherit any other memory layout, and take three times as long on a CPU.
    """
    padded_BSHX = F.pad(heads_BSHX, (0, 0, 0, 0, 0, -heads_BSHX.shape[1] % n))
    return padded_BSHX.unflatten(2, (n_keys, -1)).unflatten(1, (-1, n)).permute(0, 3, 4, 1, 2, 5).contiguous()


def in_rows(by_chunk: Tensor, seq_len: int) -> Tensor:
    """The inverse of ``chunks_of``: (B, S, heads, X). A number for each token comes as (..., n, 1)."""
    return by_chunk.flatten(3, 4).flatten(1, 2)[:, :, :seq_len].transpose(1, 2)


def unit(heads: Tensor) -> Tensor:
    """The vectors along the last dim, scaled to unit length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + LENGTH_EPS)
