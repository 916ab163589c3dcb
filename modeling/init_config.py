"""The ways in which initial weights can be drawn: plain values, no torch. modeling.init has each one's formula.

The config's ``init_std`` goes with them: it is the standard deviation of all that normal, depth_scaled and mup draw
(before their own factors). Under xavier and he it is that of embeddings and vectors, which these two do not define.
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

    The base model is this one, but narrower: as deep, with heads as wide but fewer of them. At its width nothing
    differs from DepthScaledInit, and init_std and the learning rate hold as they are given; modeling.mup has what
    follows for a wider model.
    """

    name: Literal["mup"] = "mup"
    base_d_model: Width = 256  # width of the base model, for which init_std and optimizer.lr are meant
    # d_ff of the base model; None: in proportion to base_d_model
    base_d_ff: Width | None = field(default=None, metadata={"usual": 1024})
    # moe.d_ff of the base model; None: in proportion to base_d_model
    base_expert_d_ff: Width | None = field(default=None, metadata={"usual": 256})

    def ratio(self, d_model: int) -> float:
        """The width of a model over the base model's."""
        return d_model / self.base_d_model


InitConfig = DepthScaledInit | NormalInit | XavierInit | HeInit | MupInit
