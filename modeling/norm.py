"""Norms: RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) and LayerNorm (Ba et al. 2016, arXiv:1607.06450)."""

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.config import ModelConfig
from modeling.dims import Dim, Weight
from modeling.kernels.by_rows import by_rows, rms_norm_by_rows
from modeling.kernels.fuse import Fuse, plainly


class RMSNorm(nn.Module):
    """Scales each vector along the last dim to unit root mean square, then by a weight. Computed in fp32.

    With ``adds_one`` the factor is one plus the weight, which then starts at zero (Gemma, arXiv:2403.08295).
    """

    def __init__(self, size: int, norm_eps: float, dim: Dim = "d_model", *, adds_one: bool = False) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.adds_one = adds_one
        self.fuse: Fuse = plainly
        self.weight = nn.Parameter(torch.empty(size))
        self.stated = {"weight": Weight((dim,), "zeros" if adds_one else "ones")}

    def forward(self, hidden: Tensor) -> Tensor:
        """The normed rows, of the shape and dtype of ``hidden`` (..., D)."""
        return self.fuse(rms_norm, hidden, self.weight, norm_eps=self.norm_eps, adds_one=self.adds_one)


@by_rows(rms_norm_by_rows)
def rms_norm(
    hidden: Tensor,
    weight: Tensor,
    *,
    norm_eps: float,
    adds_one: bool,
    mean_of_all: Callable[[Tensor], Tensor] = lambda mean: mean,
) -> Tensor:
    """``hidden`` normed and scaled, in its own dtype: the computation of ``RMSNorm``.

    ``mean_of_all`` turns the mean of this rank's squares into the mean over the whole dim, which tensor parallelism may
    have sharded.
    """
    hidden_fp32 = hidden.float()
    scale = torch.rsqrt(mean_of_all(hidden_fp32.pow(2).mean(-1, keepdim=True)) + norm_eps)
    if adds_one:
        return (hidden_fp32 * scale * (1 + weight.float())).to(hidden.dtype)
    return weight * (hidden_fp32 * scale).to(hidden.dtype)


class LayerNorm(nn.Module):
    """Shifts each hidden state to mean zero and scales it to unit variance, then by a weight, and adds a bias.

    Computed in fp32, over d_model alone, which is never sharded. With ``adds_one`` the factor is one plus the weight,
    which then starts at zero.
    """

    def __init__(self, d_model: int, norm_eps: float, *, adds_one: bool = False) -> None:
        super().__init__()
        self.norm_eps = norm_eps
        self.adds_one = adds_one
        self.fuse: Fuse = plainly
        self.weight = nn.Parameter(torch.empty(d_model))
        self.bias = nn.Parameter(torch.empty(d_model))
        self.stated = {
            "weight": Weight(("d_model",), "zeros" if adds_one else "ones"),
            "bias": Weight(("d_model",), "zeros"),
        }

    def forward(self, hidden: Tensor) -> Tensor:
        """The normed rows, of the shape and dtype of ``hidden`` (..., D)."""
        numbers = {"norm_eps": self.norm_eps, "adds_one": self.adds_one}
        return self.fuse(layer_norm, hidden, self.weight, self.bias, **numbers)


def layer_norm(hidden: Tensor, weight_D: Tensor, bias_D: Tensor, *, norm_eps: float, adds_one: bool) -> Tensor:
    """``hidden`` (..., D) normed, scaled and shifted, in its own dtype: the computation of ``LayerNorm``."""
    weight_D = weight_D.float() + 1 if adds_one else weight_D.float()
    return F.layer_norm(hidden.float(), weight_D.shape, weight_D, bias_D.float(), norm_eps).to(hidden.dtype)


Norm = RMSNorm | LayerNorm


def build_norm(config: ModelConfig) -> Norm:
    """A norm over d_model of the kind that the config names: on the residual stream, block outputs or embeddings."""
    match config.norm:
        case "rms":
            return RMSNorm(config.d_model, config.norm_eps, adds_one=config.norm_adds_one)
        case "layer":
            return LayerNorm(config.d_model, config.norm_eps, adds_one=config.norm_adds_one)
        case _:
            assert_never(config.norm)
