"""A linear layer whose weight has named dims, and a bias that stands alone."""

import torch
from torch import Tensor, nn

from modeling.dims import Dim, Weight
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.products import AS_THEY_ARE, Products


class Linear(nn.Module):
    """``inputs @ weight.T + bias``. ``products`` sets how the product is computed, such as in fp8."""

    def __init__(
        self, n_out: int, n_in: int, dims: tuple[Dim, Dim], *, bias: bool = False, is_residual: bool = False
    ) -> None:
        """``dims`` are (out, in). ``is_residual`` says that the output is added to the residual stream."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.bias = nn.Parameter(torch.empty(n_out)) if bias else None
        self.fuse: Fuse = plainly  # never compiled
        self.stated = {"weight": Weight(dims, "residual" if is_residual else "normal")}
        if bias:
            self.stated["bias"] = Weight(dims[:1], "zeros")
        self.products: Products = AS_THEY_ARE

    def forward(self, inputs: Tensor) -> Tensor:
        """The product and the bias: (..., n_in) -> (..., n_out), in the dtype of ``inputs``."""
        bias = () if self.bias is None else (self.bias,)
        return self.fuse(self.products.linear, inputs, self.weight, *bias)


class Bias(nn.Module):
    """A bias as a module of its own, for a product that is summed over several ranks: it is added once, to the sum."""

    def __init__(self, size: int, dim: Dim) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(size))
        self.stated = {"bias": Weight((dim,), "zeros")}

    def forward(self, outputs: Tensor) -> Tensor:
        """``outputs`` (..., size) with the bias added."""
        return outputs + self.bias
