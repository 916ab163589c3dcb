"""Stochastic gradient descent, with momentum or without."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from modeling.dims import Weight
from modeling.mup import Widths, fan_ratios
from modeling.optimizers.rule import Beta, ClipNorm, LearningRate, UpdateRule, WeightDecay

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class SGDConfig(UpdateRule):
    """Stochastic gradient descent with momentum: linear in the gradient, so it is what equality is tested with."""

    name: Literal["sgd"] = "sgd"
    lr: LearningRate = field(default=0.1, metadata={"usual": 3e-4})
    weight_decay: WeightDecay = field(default=0.0, metadata={"usual": 0.1})
    decay_embeddings: bool = False
    momentum: Beta = field(default=0.0, metadata={"usual": 0.9})  # momentum
    clip_norm: ClipNorm | None = 1.0

    @property
    def states(self) -> tuple[str, ...]:
        """The name of the momentum, where there is one."""
        return ("momentum_buffer",) if self.momentum else ()

    def width_scale(self, weight: Weight, shape: tuple[int, ...], widths: Widths) -> float:
        """The factor of the learning rate under muP, r_out / r_in (Tensor Programs V, table 3)."""
        r_in, r_out = fan_ratios(weight, widths)
        return r_out / r_in

    def build(self, groups: list[dict[str, Any]], *, fused: bool) -> "torch.optim.Optimizer":
        """The SGD of torch."""
        from torch.optim import SGD

        return SGD(groups, lr=self.lr, momentum=self.momentum, fused=fused)
