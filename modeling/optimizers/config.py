"""The configuration of the update rules: plain values, no torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101). Decay falls on matrices only."""

    name: Literal["adamw"] = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    decay_embeddings: bool = False  # whether the embedding and the head are decayed too
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0  # None: no clipping


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent with momentum: linear in the gradient, so it is what equality is tested with."""

    name: Literal["sgd"] = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    decay_embeddings: bool = False
    momentum: float = 0.0
    clip_norm: float | None = 1.0


OptimizerConfig = AdamWConfig | SGDConfig
