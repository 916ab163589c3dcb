"""AdamW: two moments of the gradient, and decoupled weight decay."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from modeling.dims import Weight
from modeling.mup import Widths, fan_ratios
from modeling.optimizers.rule import Beta, ClipNorm, Epsilon, LearningRate, UpdateRule, WeightDecay

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(UpdateRule):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101). Decay falls on matrices only."""

    counts_updates: ClassVar[bool] = True  # for the bias correction of the moments
    fused_on_cpu: ClassVar[bool] = True

    name: Literal["adamw"] = "adamw"  # the update rule
    lr: LearningRate = 3e-4  # peak learning rate
    weight_decay: WeightDecay = 0.1  # on matrices only
    decay_embeddings: bool = False  # decay the embedding, the head and learned positions too
    beta1: Beta = 0.9  # decay of the first moment
    beta2: Beta = 0.95  # decay of the second moment
    eps: Epsilon = 1e-8  # added to the root of the second moment
    clip_norm: ClipNorm | None = 1.0  # largest gradient norm; None: no clipping

    @property
    def states(self) -> tuple[str, ...]:
        """The names of both moments."""
        return ("exp_avg", "exp_avg_sq")

    def width_scale(self, weight: Weight, shape: tuple[int, ...], widths: Widths) -> float:
        """The factor of the learning rate under muP, 1 / r_in (Tensor Programs V, table 3).

        Adam's update of an element has the same size whatever the gradient's size is.
        """
        r_in, _ = fan_ratios(weight, widths)
        return 1 / r_in

    def build(self, groups: list[dict[str, Any]], *, fused: bool) -> "torch.optim.Optimizer":
        """The AdamW of torch."""
        from torch.optim import AdamW

        return AdamW(groups, lr=self.lr, betas=(self.beta1, self.beta2), eps=self.eps, fused=fused)
