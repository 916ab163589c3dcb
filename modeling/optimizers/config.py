"""The configuration of the update rules: plain values, no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101). Decay falls on matrices only."""

    name: Literal["adamw"] = "adamw"  # the update rule
    lr: float = 3e-4  # peak learning rate
    weight_decay: float = 0.1  # on matrices only
    decay_embeddings: bool = False  # decay the embedding and the head too
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    eps: float = 1e-8  # added to the root of the second moment
    clip_norm: float | None = 1.0  # largest gradient norm; None: no clipping


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent with momentum: linear in the gradient, so it is what equality is tested with."""

    name: Literal["sgd"] = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    decay_embeddings: bool = False
    momentum: float = 0.0  # momentum
    clip_norm: float | None = 1.0


OptimizerConfig = AdamWConfig | SGDConfig
