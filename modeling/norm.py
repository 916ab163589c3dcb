"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467)."""

import torch
from torch import Tensor, nn

from modeling.dims import Dim, Weight


class RMSNorm(nn.Module):
    """Scales each vector of the last dim to unit root mean square, then by a weight. Computed in fp32.

    ``adds_one``: by one and the weight, which starts at zero (Gemma, arXiv:2403.08295).
    """

    def __init__(self, size: int, norm_eps: float, dim: Dim = "d_model", *, adds_one: bool = False) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.adds_one = adds_one
        self.weight = nn.Parameter(torch.empty(size))
        self.stated = {"weight": Weight((dim,), "zeros" if adds_one else "ones")}

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape and dtype as ``hidden``."""
        hidden_fp32 = hidden.float()
        scale = torch.rsqrt(self.mean_square(hidden_fp32) + self.norm_eps)
        if self.adds_one:
            return (hidden_fp32 * scale * (1 + self.weight.float())).to(hidden.dtype)
        return self.weight * (hidden_fp32 * scale).to(hidden.dtype)

    def mean_square(self, hidden_fp32: Tensor) -> Tensor:
        """The mean of the last dim's squares (..., 1). A seam of tensor parallelism, which may cut that dim."""
        return hidden_fp32.pow(2).mean(-1, keepdim=True)
