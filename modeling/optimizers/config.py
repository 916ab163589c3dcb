"""The configuration of the update rules: plain values, no torch. Each number's type says where it may lie."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

# The largest learning rate is far above what trains: the run's health checks say what becomes of it.
LearningRate = Annotated[float, Interval(ge=0, le=1e30)]
WeightDecay = Annotated[float, Interval(ge=0, le=1000.0)]
Beta = Annotated[float, Interval(ge=0, le=0.999999)]
ClipNorm = Annotated[float, Interval(ge=1e-12, le=1e12)]


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101). Decay falls on matrices only."""

    name: Literal["adamw"] = "adamw"  # the update rule
    lr: LearningRate = 3e-4  # peak learning rate
    weight_decay: WeightDecay = 0.1  # on matrices only
    decay_embeddings: bool = False  # decay the embedding and the head too
    beta1: Beta = 0.9  # decay of the first moment
    beta2: Beta = 0.95  # decay of the second moment
    eps: Annotated[float, Interval(ge=1e-30, le=1.0)] = 1e-8  # added to the root of the second moment
    clip_norm: ClipNorm | None = 1.0  # largest gradient norm; None: no clipping


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent with momentum: linear in the gradient, so it is what equality is tested with."""

    name: Literal["sgd"] = "sgd"
    lr: LearningRate = field(default=0.1, metadata={"usual": 3e-4})
    weight_decay: WeightDecay = field(default=0.0, metadata={"usual": 0.1})
    decay_embeddings: bool = False
    momentum: Beta = field(default=0.0, metadata={"usual": 0.9})  # momentum
    clip_norm: ClipNorm | None = 1.0


OptimizerConfig = AdamWConfig | SGDConfig
