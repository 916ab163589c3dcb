"""How layers multiply by their weights: an interface, and its plain version in the weights' own dtype.

Shape letters: R rows, E experts, I inputs, O outputs.
"""

from typing import Protocol

from torch import Tensor
from torch.nn import functional as F


class Products(Protocol):
    """How a layer multiplies by its weights. ``linear`` and ``grouped`` can be differentiated by rows and weights."""

    def linear(self, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``inputs @ weight.T + bias``, from (..., I) to (..., O), in the inputs' dtype."""
        ...

    def linear_grad(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """The gradient of ``linear`` by its inputs (..., I), given that by its outputs (..., O)."""
        ...

    def weight_grad(self, grad_RO: Tensor, rows_RI: Tensor) -> Tensor:
        """The gradient of ``linear`` by its weight (O, I), given that by its outputs, and its inputs."""
        ...

    def grouped(self, rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor) -> Tensor:
        """Each row times its expert's matrix (R, O); expert e's rows end before ``ends_E[e]`` (int32)."""
        ...

    def weights_changed(self) -> None:
        """To be called whenever the weights' values have changed."""
        ...

    def kept(self) -> list[Tensor]:
        """The tensors made from weights that are kept between calls of ``weights_changed``."""
        ...


class AsTheyAre:
    """Products of rows and weights in the dtype that both have: the reference."""

    def linear(self, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``inputs @ weight.T + bias`` (..., O)."""
        return F.linear(inputs, weight_OI, bias_O)

    def linear_grad(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """``grad @ weight`` (..., I)."""
        return (grad.flatten(0, -2) @ weight_OI).view(*grad.shape[:-1], weight_OI.shape[1])

    def weight_grad(self, grad_RO: Tensor, rows_RI: Tensor) -> Tensor:
        """``grad.T @ rows`` (O, I)."""
        return grad_RO.t() @ rows_RI

    def grouped(self, rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor) -> Tensor:
        """Each row times its expert's matrix (R, O)."""
        return F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=ends_E)

    def weights_changed(self) -> None:
        """Does nothing, since nothing is kept."""

    def kept(self) -> list[Tensor]:
        """No tensors."""
        return []


AS_THEY_ARE = AsTheyAre()
