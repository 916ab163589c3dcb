"""Norms: RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) and LayerNorm (Ba et al. 2016, arXiv:1607.06450)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.config import ModelConfig
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


class LayerNorm(nn.Module):
    """Shifts each hidden state to mean zero and scales it to unit variance, then by a weight, and adds a bias.

    Computed in fp32. It is over d_model alone, which no axis cuts. ``adds_one``: by one and the weight, which starts at
    zero.
    """

    def __init__(self, d_model: int, norm_eps: float, *, adds_one: bool = False) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.adds_one = adds_one
        self.weight = nn.Parameter(torch.empty(d_model))
        self.bias = nn.Parameter(torch.empty(d_model))
        self.stated = {
            "weight": Weight(("d_model",), "zeros" if adds_one else "ones"),
            "bias": Weight(("d_model",), "zeros"),
        }

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape and dtype as ``hidden`` (..., D)."""
        weight_D = self.weight.float() + 1 if self.adds_one else self.weight.float()
        normed = F.layer_norm(hidden.float(), weight_D.shape, weight_D, self.bias.float(), self.norm_eps)
        return normed.to(hidden.dtype)


Norm = RMSNorm | LayerNorm


def build_norm(config: ModelConfig) -> Norm:
    """A norm of the residual stream, of what is added to it, or of the embedded tokens."""
    kind = LayerNorm if config.norm == "layer" else RMSNorm
    return kind(config.d_model, config.norm_eps, adds_one=config.norm_adds_one)
