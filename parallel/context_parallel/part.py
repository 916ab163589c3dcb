"""The positions of a sequence that each cp rank holds: zig-zag, so that causal attention is the same work on all.

A sequence is cut into 2 * cp equal chunks, and rank r holds chunk r, then chunk 2 * cp - 1 - r (Llama 3,
arXiv:2407.21783, section 3.3.2). For one long document each rank then attends over 2 * cp + 1 pairs of chunks, two of
them halved by causality.

Three orders of positions: natural; held (one rank's, ascending); rank-major (rank 0's held positions, then rank 1's,
and so on).
"""

import torch
from torch import Tensor

from parallel.mesh import Axis


def held_positions(seq_len: int, cp_rank: int, cp: int, device: torch.device | None = None) -> Tensor:
    """Natural positions (int64, ascending, seq_len / cp of them) that rank ``cp_rank`` of ``cp`` holds."""
    chunk = chunk_length(seq_len, cp)
    first = torch.arange(cp_rank * chunk, (cp_rank + 1) * chunk, device=device)
    last = torch.arange((2 * cp - 1 - cp_rank) * chunk, (2 * cp - cp_rank) * chunk, device=device)
    return torch.cat([first, last])


def held_position(index: int, seq_len: int, cp_rank: int, cp: int) -> int:
    """The natural position of the ``index``-th one that rank ``cp_rank`` of ``cp`` holds, as an int."""
    chunk = chunk_length(seq_len, cp)
    return cp_rank * chunk + index if index < chunk else (2 * cp - 1 - cp_rank) * chunk + index - chunk


def rank_major_order(seq_len: int, cp: int, device: torch.device | None = None) -> Tensor:
    """Permutation (int64): the natural position of each place in rank-major order; ``natural[order]`` is rank-major."""
    return torch.cat([held_positions(seq_len, rank, cp, device) for rank in range(cp)])


def natural_order(seq_len: int, cp: int, device: torch.device | None = None) -> Tensor:
    """Permutation (int64): the rank-major place of each natural position; ``rank_major[order]`` is natural.

    It is the inverse of ``rank_major_order``.
    """
    chunk = chunk_length(seq_len, cp)
    position = torch.arange(seq_len, device=device)
    number = position // chunk
    is_second = number >= cp
    owner = torch.where(is_second, 2 * cp - 1 - number, number)
    return (2 * owner + is_second) * chunk + position % chunk


def take_share(values_BN: Tensor, axis: Axis) -> Tensor:
    """The part of dim 1 (natural order, the whole sequence) that this cp rank holds, in held order."""
    positions = held_positions(values_BN.shape[1], axis.rank, axis.degree, values_BN.device)
    return values_BN.index_select(1, positions)


def chunk_length(seq_len: int, cp: int) -> int:
    """The number of positions of one of the 2 * cp chunks. Callers check beforehand that 2 * cp divides seq_len."""
    assert seq_len % (2 * cp) == 0, (seq_len, cp)
    return seq_len // (2 * cp)
