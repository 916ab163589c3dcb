"""The configuration of layers with experts: plain values, no torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, assert_never

from annotated_types import Interval

from modeling.ranges import Coefficient, Count, Layer, Width

ScoreName = Literal["softmax", "sigmoid"]  # modeling.router.SCORES has each one's formula


# Each balancing rule says whether it moves the selection biases, which the routers then have.
@dataclass(frozen=True, kw_only=True)
class SequenceAuxBalance:
    """Balance by an auxiliary loss computed within each sequence (DeepSeek-V3, section 2.1.2, eq. 17-20)."""

    moves_bias: ClassVar[bool] = False

    # sequence_aux: by a loss within each sequence; bias: by a bias moved after each step
    name: Literal["sequence_aux"] = "sequence_aux"
    coefficient: Coefficient = field(default=1e-3, metadata={"strong": 0.05})  # factor of the loss


@dataclass(frozen=True, kw_only=True)
class BiasBalance:
    """Balance by a bias on the selection scores, moved after each step (Wang et al. 2024, arXiv:2408.15664)."""

    moves_bias: ClassVar[bool] = True

    name: Literal["bias"] = "bias"
    rate: Coefficient = field(default=1e-3, metadata={"strong": 1e-2})  # how far it moves in a step


@dataclass(frozen=True, kw_only=True)
class NoBalance:
    """No balancing rule."""

    moves_bias: ClassVar[bool] = False

    name: Literal["none"] = "none"


Balance = SequenceAuxBalance | BiasBalance | NoBalance


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The mixture-of-experts feed-forward layers. Routing is dropless: every token reaches its top_k experts.

    ``d_ff`` is one expert's width; the shared experts together form one feed-forward layer of width ``shared_width``.
    """

    noun: ClassVar[str] = "experts"  # what a model with this section has, in messages

    n_experts: Count = 8  # experts of a layer
    top_k: Count = field(default=2, metadata={"usual": 1, "small": 4})  # experts a token goes to; none is ever dropped
    d_ff: Width = 512  # width of one expert
    expert_bias: bool = False  # the experts' projections have biases
    # gpt-oss's SwiGLU in the experts, gates and values clamped to it; None: the plain one
    swiglu_limit: Annotated[float, Interval(ge=1e-3, le=1e6)] | None = field(
        default=None, metadata={"usual": 7.0, "small": 2.0}
    )
    # experts that every token goes to
    n_shared_experts: Annotated[int, Interval(ge=0, le=1024)] = field(default=0, metadata={"small": 2})
    # width of all shared experts together; None: n_shared_experts x d_ff
    shared_d_ff: Width | None = field(default=None, metadata={"usual": 2048})
    shared_gate: bool = False  # the shared experts' output is multiplied by a sigmoid of a projection to one number
    # so many leading layers have no experts, but a width of model.d_ff
    n_dense_layers: Annotated[int, Interval(ge=0, le=10_000)] = 0
    every_n_layers: Annotated[int, Interval(ge=1, le=10_000)] = 1  # the last of every so many layers has experts
    # layers (from 0) that have no experts all the same
    dense_layers: tuple[Layer, ...] = field(default=(), metadata={"usual": 1})
    # groups of experts; a token's top_k are in the top_k_groups of the largest scores
    n_groups: Count = field(default=1, metadata={"small": 4})
    top_k_groups: Count = field(default=1, metadata={"small": 2})  # groups among which a token's experts are chosen
    group_score: Literal["best_two", "best"] = "best_two"  # of a group: the sum of its best two experts', or the best's
    logit_bias: bool = False  # the router's logits have a trained bias
    score: ScoreName = "softmax"  # of the router's logits
    normalize_top_k: bool = True  # the chosen experts' weights sum to one (before routed_scale)
    routed_scale: Annotated[float, Interval(ge=1e-6, le=1e6)] = 1.0  # factor on the routed experts' output
    balance: Balance = field(default_factory=SequenceAuxBalance)
    # coefficient of the router z-loss (ST-MoE, arXiv:2202.08906, eq. 5)
    z_loss: Coefficient = field(default=0.0, metadata={"usual": 0.0001, "strong": 1e-2})

    @property
    def shared_width(self) -> int:
        """Width of all shared experts together; 0 where there are none."""
        if self.n_shared_experts == 0 or self.shared_d_ff is None:
            return self.n_shared_experts * self.d_ff
        return self.shared_d_ff

    @property
    def balance_coefficient(self) -> float:
        """The factor of the balance loss; 0 under other balancing rules.

        It is also 0 where each token goes to all experts: then the loss is 1 whatever the router does, and its gradient
        would be rounding error.
        """
        match self.balance:
            case SequenceAuxBalance(coefficient=coefficient):
                return 0.0 if self.top_k == self.n_experts else coefficient
            case BiasBalance() | NoBalance():
                return 0.0
            case _:
                assert_never(self.balance)

    @property
    def choosable(self) -> int:
        """The number of experts in the groups that a token's top_k experts are chosen from."""
        return self.n_experts // self.n_groups * self.top_k_groups

    def problems(self) -> Iterator[str]:
        """One message for each broken rule between the fields."""
        experts, groups, kept = self.n_experts, self.n_groups, self.top_k_groups
        if min(self.top_k, experts, groups, kept) < 1:
            return
        if self.top_k > experts:
            yield (
                f"model.moe.top_k={self.top_k} must be at most model.moe.n_experts={experts}; "
                f"try {experts}, or more experts"
            )
        if groups > 1 and (experts % groups or experts < 2 * groups):
            legal = [number for number in range(2, min(groups, experts // 2) + 1) if experts % number == 0]
            yield (
                f"model.moe.n_groups={groups} must cut model.moe.n_experts={experts} into equal groups of two or more; "
                f"try {max(legal, default=1)}"
            )
        elif kept > groups:
            yield f"model.moe.top_k_groups={kept} must be at most model.moe.n_groups={groups}; try {groups}"
        elif experts >= self.top_k > self.choosable:
            yield (
                f"model.moe.top_k={self.top_k} must be at most the {self.choosable} experts of "
                f"model.moe.top_k_groups={kept} of model.moe.n_groups={groups} groups; try {self.choosable}"
            )
