"""The ways in which first weights can be drawn: plain values, no torch. modeling.init has each one's formula.

A config's ``init_std`` goes with them: it is the deviation of everything that Xavier and He say nothing of (tables of
which rows are looked up, and vectors), and of all that is drawn by the other three.
"""

from dataclasses import dataclass, field
from typing import Literal

from modeling.ranges import Width

Distribution = Literal["uniform", "normal"]


@dataclass(frozen=True, kw_only=True)
class DepthScaledInit:
    """Normal with init_std, less where a matrix writes to the residual stream (GPT-2, section 2.3)."""

    # of first weights; depth_scaled: normal with init_std, divided by sqrt(2 n_layers) in matrices that write to the
    # residual stream; normal: init_std in all; xavier, he: by each matrix's fans; mup: depth_scaled, and by the width
    name: Literal["depth_scaled"] = "depth_scaled"


@dataclass(frozen=True, kw_only=True)
class NormalInit:
    """Normal with init_std, whatever a weight is for."""

    name: Literal["normal"] = "normal"


@dataclass(frozen=True, kw_only=True)
class XavierInit:
    """Each matrix by its fans' mean (Glorot & Bengio 2010, section 4.2.1, eq. 16)."""

    name: Literal["xavier"] = "xavier"
    distribution: Distribution = "uniform"  # of a matrix's elements; both have the same variance


@dataclass(frozen=True, kw_only=True)
class HeInit:
    """Each matrix by its fan-in (He et al. 2015, arXiv:1502.01852, section 2.2, eq. 10)."""

    name: Literal["he"] = "he"
    distribution: Distribution = "normal"


@dataclass(frozen=True, kw_only=True)
class MupInit:
    """The maximal update parametrization (Yang et al. 2022, arXiv:2203.03466, table 3), from a base model on.

    The base model is this one, narrower: as deep, with as wide heads, fewer of them. There it is DepthScaledInit, with
    init_std and the learning rate as they are given. modeling.mup says what follows for a wider one.
    """

    name: Literal["mup"] = "mup"
    base_d_model: Width = 256  # width of the base model, for which init_std and optimizer.lr are meant
    # d_ff of the base model; None: in proportion to base_d_model
    base_d_ff: Width | None = field(default=None, metadata={"usual": 1024})
    # moe.d_ff of the base model; None: in proportion to base_d_model
    base_expert_d_ff: Width | None = field(default=None, metadata={"usual": 256})

    def ratio(self, d_model: int) -> float:
        """How many times as wide a model is as the base model."""
        return d_model / self.base_d_model


InitConfig = DepthScaledInit | NormalInit | XavierInit | HeInit | MupInit
