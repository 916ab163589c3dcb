"""The dense feed-forward layer: a gated linear unit (Shazeer 2020, arXiv:2002.05202), or one without a gate."""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from modeling.config import ActivationName
from modeling.dims import Dim
from modeling.kernels.fuse import Fuse, plainly
from modeling.linear import Bias, Linear
from modeling.positions import ALL_POSITIONS


def relu2(up: Tensor) -> Tensor:
    """The square of ReLU (Primer: So et al. 2021, arXiv:2109.08668, section 4.2)."""
    return F.relu(up).square()


ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": relu2,
}


def activated(up: Tensor, *, activation: ActivationName) -> Tensor:
    """activation(up), of the shape and dtype of ``up``."""
    return ACTIVATIONS[activation](up)


def gated(gate: Tensor, up: Tensor, *, activation: ActivationName) -> Tensor:
    """activation(gate) * up, of the shape and dtype of ``up``."""
    return ACTIVATIONS[activation](gate) * up


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x))).

    Tensor parallelism enters through ``positions``.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        inner: Dim = "d_ff",
        *,
        gated: bool = True,
        bias: bool = False,
        activation: ActivationName = "silu",
    ) -> None:
        """``inner`` is the name of the dim of size ``d_ff``."""
        super().__init__()
        self.gate = Linear(d_ff, d_model, (inner, "d_model"), bias=bias) if gated else None
        self.up = Linear(d_ff, d_model, (inner, "d_model"), bias=bias)
        self.down = Linear(d_model, d_ff, ("d_model", inner), is_residual=True)
        self.down_bias = Bias(d_model, "d_model") if bias else None
        self.activation: ActivationName = activation
        self.fuse: Fuse = plainly
        self.positions = ALL_POSITIONS

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output, of the shape and dtype of ``hidden`` (..., D)."""
        hidden = self.positions.gather(hidden)
        if self.gate is None:
            inner = self.fuse(activated, self.up(hidden), activation=self.activation)
        else:
            inner = self.fuse(gated, self.gate(hidden), self.up(hidden), activation=self.activation)
        summed = self.positions.scatter_sum(self.down(inner))
        return summed if self.down_bias is None else self.down_bias(summed)
