"""The mixture-of-experts feed-forward layer: dropless routing, experts, and optional shared experts.

Shape letters: B batch, S sequence, T tokens, D d_model, E experts, K top_k, F d_ff.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from modeling.balance import InjectLoss, sequence_balance_losses, sequence_balance_sums, z_losses_and_entropies
from modeling.config import ActivationName
from modeling.context import Context
from modeling.dims import Weight
from modeling.feed_forward import FeedForward
from modeling.kernels.experts import ExpertBiases, Ways, count_pairs, experts_grouped, go_by_turn
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.products import AS_THEY_ARE, Products
from modeling.linear import Linear
from modeling.metrics import Metric
from modeling.moe_config import MoEConfig
from modeling.positions import Unsummed
from modeling.router import Router, Routing, build_router


@dataclass
class RoutingStats:
    """Statistics of one MoE layer in one forward pass, detached.

    Each field with a ``Metric`` is a metric of the run.
    """

    counts_E: Tensor  # int64, token-expert pairs processed by each expert
    choice_TK: Tensor  # int64, the experts chosen for each routed token
    # nats, of the affinity, summed over tokens
    entropy: Annotated[Tensor, Metric("moe/layer_{layer:02d}/entropy", mean_over="tokens")]
    # summed over sequences, without its coefficient
    balance_loss: Annotated[Tensor, Metric("moe/balance_loss", mean_over="sequences")]
    # summed over tokens, without its coefficient
    z_loss: Annotated[Tensor, Metric("moe/z_loss", mean_over="tokens")]


# (rows_RD, weights_TK, gate_EFD, up_EFD, down_EDF, biases, swiglu_limit, ways) -> out_TD
ComputeExperts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, ExpertBiases | None, float | None, Ways], Tensor]
# (hidden_TD, indices_TK, counts_E, fuse) -> rows_RD, which may still be in transit, and the function that computes the
# experts' outputs from them
ExpertDispatch = Callable[[Tensor, Tensor, Tensor, Fuse], tuple[Tensor, ComputeExperts]]


def staying(experts: Callable[..., Tensor]) -> ExpertDispatch:
    """The dispatch on one device, which sends nothing. ``experts`` is experts_grouped, or computes the same."""

    def dispatch(hidden_TD: Tensor, indices_TK: Tensor, counts_E: Tensor, fuse: Fuse) -> tuple[Tensor, ComputeExperts]:
        return hidden_TD, lambda hidden_TD, *rest: experts(hidden_TD, indices_TK, *rest, counts_E=counts_E)

    return dispatch


class Sender(nn.Module):
    """Sends tokens to their experts by ``dispatch``, which is where expert parallelism enters."""

    def __init__(self) -> None:
        super().__init__()
        self.dispatch: ExpertDispatch = staying(experts_grouped)

    def forward(
        self, hidden_TD: Tensor, indices_TK: Tensor, counts_E: Tensor, fuse: Fuse
    ) -> tuple[Tensor, ComputeExperts]:
        """The rows and the function that ``Experts`` is called with. Nothing else may read the rows."""
        return self.dispatch(hidden_TD, indices_TK, counts_E, fuse)


class Experts(nn.Module):
    """The experts' weights, stacked. ``products`` sets how they are multiplied by, such as in fp8.

    ``kept_share`` is the share of rows whose gate and up projections are kept for the backward pass rather than
    recomputed (modeling.kernels.experts.Ways).
    """

    def __init__(
        self,
        *,
        n_experts: int,
        d_model: int,
        d_ff: int,
        expert_bias: bool = False,
        swiglu_limit: float | None = None,
    ) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(n_experts, d_ff, d_model))
        self.up = nn.Parameter(torch.empty(n_experts, d_ff, d_model))
        self.down = nn.Parameter(torch.empty(n_experts, d_model, d_ff))
        self.stated = {
            "gate": Weight(("experts", "expert_d_ff", "d_model")),
            "up": Weight(("experts", "expert_d_ff", "d_model")),
            "down": Weight(("experts", "d_model", "expert_d_ff"), "residual"),
            "gate_bias": Weight(("experts", "expert_d_ff"), "zeros"),
            "up_bias": Weight(("experts", "expert_d_ff"), "zeros"),
            "down_bias": Weight(("experts", "d_model"), "zeros"),
        }
        self.expert_bias = expert_bias
        if expert_bias:
            self.gate_bias = nn.Parameter(torch.empty(n_experts, d_ff))
            self.up_bias = nn.Parameter(torch.empty(n_experts, d_ff))
            self.down_bias = nn.Parameter(torch.empty(n_experts, d_model))
        self.swiglu_limit = swiglu_limit
        self.fuse: Fuse = plainly
        self.products: Products = AS_THEY_ARE
        self.kept_share = 1.0

    def go_by_turn(self, hidden: Tensor) -> bool:
        """Whether they are computed one after another over rows like ``hidden``, which ``kept_share`` is for.

        It may be asked outside of their own forward pass: it reads no weight by name, which ZeRO 3 would gather.
        """
        is_plain = not self.expert_bias and self.swiglu_limit is None
        weight = next(each for each in self._parameters.values() if each is not None)
        return go_by_turn(hidden, weight, self.products, is_plain=is_plain)

    def forward(self, rows_RD: Tensor, weights_TK: Tensor, compute: ComputeExperts, *, is_last: bool = True) -> Tensor:
        """Each token's weighted sum of its experts' outputs (T, D), from what a ``Sender`` returned.

        ``is_last`` says that the layer saves nothing after this for its backward pass. Then with a ``kept_share`` of 0,
        recomputation of the layer can stop before the experts. Otherwise it would compute them again, so all of their
        rows are kept.
        """
        biases = ExpertBiases(self.gate_bias, self.up_bias, self.down_bias) if self.expert_bias else None
        matrices = (self.gate, self.up, self.down)
        kept_share = self.kept_share if is_last else self.kept_share or 1.0
        ways = Ways(self.fuse, self.products, kept_share)
        return compute(rows_RD, weights_TK, *matrices, biases, self.swiglu_limit, ways)


class MoE(nn.Module):
    """An MoE layer: router, experts, shared experts, and the auxiliary losses' gradients.

    ``add_sequence_sums`` turns this rank's sums over its part of each sequence into those over the whole sequence,
    where ranks share sequences. With ``shared_early`` the shared experts are computed while tokens are in transit to
    their experts; then ``sum_shared`` adds up the ranks' parts of their output under tp, at the end of the layer.
    """

    def __init__(
        self,
        *,
        router: Router,
        experts: Experts,
        shared: FeedForward | None,
        shared_gate: Linear | None,
        balance_coefficient: float,
        z_loss: float,
    ) -> None:
        super().__init__()
        self.router = router
        self.sender = Sender()
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate
        self.balance_coefficient = balance_coefficient
        self.z_loss = z_loss
        self.fuse: Fuse = plainly
        self.add_sequence_sums: Callable[[Tensor], Tensor] = lambda sums_BX: sums_BX
        self.shared_early = False
        self.sum_shared: Callable[[Tensor], Tensor] = lambda partial_BSD: partial_BSD

    def forward(self, hidden_BSD: Tensor, context: Context, layer: int) -> tuple[Tensor, RoutingStats]:
        """The layer's output (B, S, D), and statistics of its router.

        Padding is not routed: the experts' output for it is zero.
        """
        hidden_TD = hidden_BSD.flatten(0, 1)
        valid_T = context.valid_T
        routed_TD = hidden_TD if valid_T is None else hidden_TD.index_select(0, valid_T)
        routing = self.router(routed_TD, context.choices.get(layer))
        counts_E = count_pairs(routing.indices_TK, routing.logits_TE.shape[1])
        rows_RD, compute = self.sender(routed_TD, routing.indices_TK, counts_E, self.experts.fuse)
        weights_TK, stats = self.add_auxiliary_losses(routing, counts_E, context)
        shared_BSD = None
        if self.shared is not None and self.shared_early:
            shared_BSD = self.shared(hidden_BSD)
        is_last = valid_T is None and self.shared is None
        out_TD = self.experts(rows_RD, weights_TK, compute, is_last=is_last)
        if valid_T is not None:
            out_TD = torch.zeros_like(hidden_TD).index_copy(0, valid_T, out_TD)
        out_BSD = out_TD.view_as(hidden_BSD)
        if self.shared is not None:
            shared_BSD = self.sum_shared(self.shared(hidden_BSD) if shared_BSD is None else shared_BSD)
            if self.shared_gate is not None:
                shared_BSD = self.shared_gate(hidden_BSD).sigmoid() * shared_BSD
            out_BSD = out_BSD + shared_BSD
        return out_BSD, stats

    def compute_shared_early(self) -> None:
        """Sets ``shared_early``: from now on the shared experts are computed before the routed ones.

        Their sum over the ranks of tp stays behind the routed experts, so that recomputation, which stops at the last
        tensor that is needed, does not communicate it again.
        """
        if self.shared is not None:
            positions = self.shared.positions
            self.shared.positions, self.sum_shared = Unsummed(positions), positions.scatter_sum
            self.shared_early = True

    def add_auxiliary_losses(self, routing: Routing, counts_E: Tensor, context: Context) -> tuple[Tensor, RoutingStats]:
        """The routing weights, which now carry the gradients of balance loss and z-loss; and the layer's statistics."""
        indices_TK, weights_TK, logits_TE, affinity_TE = routing
        balance = self.sequence_losses(affinity_TE, indices_TK, context).sum()
        logits_TE = logits_TE if self.z_loss else logits_TE.detach()
        z_T, entropy_T = self.fuse(z_losses_and_entropies, logits_TE, affinity_TE.detach(), rows_vary=True)
        z, entropy = z_T.sum(), entropy_T.sum()
        if self.balance_coefficient:
            scale = self.balance_coefficient * context.balance_scale
            weights_TK = InjectLoss.apply(weights_TK, balance, scale)
        if self.z_loss:
            weights_TK = InjectLoss.apply(weights_TK, z, self.z_loss * context.z_scale)
        stats = RoutingStats(
            counts_E=counts_E,
            choice_TK=indices_TK,
            entropy=entropy.detach(),
            balance_loss=balance.detach(),
            z_loss=z.detach(),
        )
        return weights_TK, stats

    def sequence_losses(self, affinity_TE: Tensor, indices_TK: Tensor, context: Context) -> Tensor:
        """Each sequence's balance loss (B,).

        Where there is padding, routed tokens are first put back in their places.
        """
        valid_T, top_k = context.valid_T, indices_TK.shape[1]
        if valid_T is not None:
            n_tokens = context.documents_BS.numel()
            affinity_TE = affinity_TE.new_zeros(n_tokens, affinity_TE.shape[1]).index_copy(0, valid_T, affinity_TE)
            indices_TK = indices_TK.new_zeros(n_tokens, top_k).index_copy(0, valid_T, indices_TK)
        has_padding = valid_T is not None
        sums_BX = sequence_balance_sums(affinity_TE, indices_TK, context.documents_BS, has_padding=has_padding)
        return sequence_balance_losses(self.add_sequence_sums(sums_BX), top_k)


def build_moe(config: MoEConfig, d_model: int, activation: ActivationName = "silu") -> MoE:
    """One MoE feed-forward layer."""
    width = config.shared_width
    return MoE(
        router=build_router(config, d_model),
        experts=Experts(
            n_experts=config.n_experts,
            d_model=d_model,
            d_ff=config.d_ff,
            expert_bias=config.expert_bias,
            swiglu_limit=config.swiglu_limit,
        ),
        shared=FeedForward(d_model, width, "shared_d_ff", activation=activation) if width else None,
        shared_gate=Linear(1, d_model, ("one", "d_model")) if width and config.shared_gate else None,
        balance_coefficient=config.balance_coefficient,
        z_loss=config.z_loss,
    )
