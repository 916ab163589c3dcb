"""A matrix product whose weight has named dims."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.dims import Dim, Weight


class Linear(nn.Module):
    """``inputs @ weight.T``, without a bias."""

    def __init__(self, n_out: int, n_in: int, dims: tuple[Dim, Dim], *, is_residual: bool = False) -> None:
        """``dims`` are (out, in); ``is_residual``: the output is added to the residual stream."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.stated = {"weight": Weight(dims, "residual" if is_residual else "normal")}

    def forward(self, inputs: Tensor) -> Tensor:
        """From (..., n_in) to (..., n_out)."""
        return F.linear(inputs, self.weight)
