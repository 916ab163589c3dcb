"""A matrix product whose weight has named dims, and biases."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.dims import Dim, Weight


class Linear(nn.Module):
    """``inputs @ weight.T + bias``."""

    def __init__(
        self, n_out: int, n_in: int, dims: tuple[Dim, Dim], *, bias: bool = False, is_residual: bool = False
    ) -> None:
        """``dims`` are (out, in); ``is_residual``: the output is added to the residual stream."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None
        self.stated = {"weight": Weight(dims, "residual" if is_residual else "normal")}
        if bias:
            self.stated["bias"] = Weight(dims[:1], "zeros")

    def forward(self, inputs: Tensor) -> Tensor:
        """From (..., n_in) to (..., n_out)."""
        return F.linear(inputs, self.weight, self.bias)


class Bias(nn.Module):
    """A bias of its own, for a matrix product that is the sum over several ranks: it is added to the sum, once."""

    def __init__(self, size: int, dim: Dim) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size))
        self.stated = {"bias": Weight((dim,), "zeros")}

    def forward(self, outputs: Tensor) -> Tensor:
        """``outputs`` (..., size) with the bias added."""
        return outputs + self.bias
