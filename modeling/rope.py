"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotating the two halves of a head as Llama does.

Shape letters: B batch, S sequence, H heads, C rope_dim.
"""

import torch
from torch import Tensor


def rope_tables(positions_BS: Tensor, rope_dim: int, rope_theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of each position's angles: two fp32 tensors (B, S, C/2)."""
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32, device=positions_BS.device) / rope_dim
    angles_BSC = positions_BS[..., None].float() * (1.0 / rope_theta**exponents)
    return angles_BSC.cos(), angles_BSC.sin()


def rotate(heads_BSHC: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """``heads_BSHC`` with channel pairs (c, c + C/2) turned by their position's angle; same shape and dtype."""
    cos, sin = (table[:, :, None, :].to(heads_BSHC.dtype) for table in tables)
    first, second = heads_BSHC.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
