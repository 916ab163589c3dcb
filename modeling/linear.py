"""A matrix product whose weight has named dims, and a bias where asked for."""

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

    def product(self, inputs: Tensor) -> Tensor:
        """Without the bias: for a product that is a summand of the whole on each of several ranks."""
        return F.linear(inputs, self.weight)

    def add_bias(self, outputs: Tensor) -> Tensor:
        """The bias added to what ``product`` gave."""
        return outputs if self.bias is None else outputs + self.bias
