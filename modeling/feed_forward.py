"""The dense feed-forward layer: SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

from torch import Tensor, nn
from torch.nn import functional as F


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape and dtype as ``hidden`` (..., D)."""
        return self.down(F.silu(self.gate(hidden)) * self.up(hidden))
