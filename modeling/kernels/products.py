"""The matrix products of layers, by weights as they are: the seam at which another precision enters.

Shape letters: R rows, E experts, I what goes in, O what comes out.
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Products(Protocol):
    """How a layer multiplies by its weights. ``linear`` and ``grouped`` can be differentiated by rows and weights."""

    def linear(self, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``inputs @ weight.T + bias``, from (..., I) to (..., O), of the inputs' dtype."""
        ...

    def linear_grad(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """``linear``'s gradient by its inputs (..., I), from that by its outputs (..., O)."""
        ...

    def weight_grad(self, grad_RO: Tensor, rows_RI: Tensor) -> Tensor:
        """``linear``'s gradient by its weight (O, I), from that by its outputs and from its inputs."""
        ...

    def grouped(self, rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor) -> Tensor:
        """Each row times its expert's matrix (R, O); expert e's rows end before ``ends_E[e]`` (int32)."""
        ...

    def weights_changed(self) -> None:
        """To be called whenever weights have got other values."""
        ...

    def kept(self) -> list[Tensor]:
        """What is kept of weights, from one call of ``weights_changed`` to the next."""
        ...


class AsTheyAre:
    """Products of rows and weights in the dtype that both have."""

    def linear(self, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """As Products.linear."""
        return F.linear(inputs, weight_OI, bias_O)

    def linear_grad(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """As Products.linear_grad."""
        return (grad.flatten(0, -2) @ weight_OI).view(*grad.shape[:-1], weight_OI.shape[1])

    def weight_grad(self, grad_RO: Tensor, rows_RI: Tensor) -> Tensor:
        """As Products.weight_grad."""
        return grad_RO.t() @ rows_RI

    def grouped(self, rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor) -> Tensor:
        """As Products.grouped."""
        return F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=ends_E)

    def weights_changed(self) -> None:
        """As Products.weights_changed."""

    def kept(self) -> list[Tensor]:
        """As Products.kept: nothing."""
        return []


AS_THEY_ARE = AsTheyAre()
