"""The router of an MoE layer: which experts each token goes to, and with what weight.

Shape letters: T tokens, D d_model, E experts, K top_k, G groups of experts.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from modeling.dims import Weight
from modeling.kernels.fuse import Fuse, plainly
from modeling.kernels.router_logits import RouterLogits
from modeling.kernels.top_k import top_k_places
from modeling.moe_config import MoEConfig, ScoreName


class Score(NamedTuple):
    """How a router's logits become its scores, which are not negative."""

    of: Callable[[Tensor], Tensor]  # logits_TE -> scores_TE
    sums_to_one: bool = False  # whether each token's scores sum to one


SCORES: dict[ScoreName, Score] = {
    "softmax": Score(lambda logits_TE: logits_TE.softmax(-1), sums_to_one=True),
    "sigmoid": Score(torch.sigmoid),
}


class Routing(NamedTuple):
    """The experts chosen for each token and their weights, with what the auxiliary losses need. All floats are fp32."""

    indices_TK: Tensor  # int64, the experts chosen
    weights_TK: Tensor  # what each chosen expert's output is multiplied by
    logits_TE: Tensor
    affinity_TE: Tensor  # the scores, normalized to sum to one over the experts


ReviseChoice = Callable[[Tensor, Tensor], Tensor]


def keep_choice(scores_TE: Tensor, indices_TK: Tensor) -> Tensor:
    """The router's own choice, as it is: ``Router.revise_choice`` in training."""
    return indices_TK


class Router(nn.Module):
    """Top-k routing by one of SCORES (sigmoid and the bias: DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    With ``n_groups`` above one, a token's experts are chosen within its best ``top_k_groups`` groups: those with the
    largest sums of their ``n_best`` best scores (two in DeepSeek-V3; one in DeepSeek-V2, arXiv:2405.04434, section
    2.2.2).

    With ``has_bias`` the buffer ``bias`` is added to the scores for the choice alone, never for the weights; it always
    stays fp32 and is updated by ``modeling.balance.updated_bias``. With ``logit_bias`` a trained bias is part of the
    logits, and so of the choice and the weights. Logits are computed in fp32.

    ``revise_choice(scores_TE, indices_TK) -> indices_TK`` is called on each choice. `roundtable prove` puts a function
    there that records choices, or replays another run's choice where scores are tied.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_experts: int,
        top_k: int,
        n_groups: int = 1,
        top_k_groups: int = 1,
        n_best: int,
        score: ScoreName,
        normalize_top_k: bool,
        routed_scale: float,
        has_bias: bool,
        logit_bias: bool = False,
        has_auxiliary_losses: bool = True,
    ) -> None:
        """``has_auxiliary_losses`` says whether a balance loss or a z-loss trains the router's weights."""
        super().__init__()
        self.top_k = top_k
        self.n_groups = n_groups
        self.top_k_groups = top_k_groups
        self.n_best = n_best
        self.score: ScoreName = score
        self.normalize_top_k = normalize_top_k
        self.routed_scale = routed_scale
        self.weight = nn.Parameter(torch.empty(n_experts, d_model))
        self.logit_bias = nn.Parameter(torch.empty(n_experts)) if logit_bias else None
        weighs_one = top_k == 1 and normalize_top_k  # the weight is 1 whatever the scores are: no gradient through it
        cancels = weighs_one and not has_auxiliary_losses
        self.stated = {
            "weight": Weight(("scores", "d_model"), cancels=cancels),
            "logit_bias": Weight(("scores",), "zeros", cancels=cancels),
            "bias": Weight(("scores",), "zeros"),
        }
        self.revise_choice: ReviseChoice = keep_choice
        self.fuse: Fuse = plainly  # for the scores that decide the choice: never compiled
        self.fuse_weights: Fuse = plainly
        self.bias: Tensor | None
        self.register_buffer("bias", torch.empty(n_experts, dtype=torch.float32) if has_bias else None)

    def forward(self, hidden_TD: Tensor, choice_TK: Tensor | None = None) -> Routing:
        """Routes each token. ``choice_TK`` replays a given choice of experts instead of making one."""
        logit_bias = () if self.logit_bias is None else (self.logit_bias,)
        logits_TE, scores_TE = self.fuse(scored, hidden_TD, self.weight, *logit_bias, score=self.score)
        score = SCORES[self.score]
        indices_TK = self.revise_choice(scores_TE, self.choose(scores_TE)) if choice_TK is None else choice_TK
        ways = {"normalize_top_k": self.normalize_top_k, "routed_scale": self.routed_scale}
        if score.sums_to_one:
            weights_TK = self.fuse_weights(weights_of, scores_TE, indices_TK, rows_vary=True, **ways)
            return Routing(indices_TK, weights_TK, logits_TE, scores_TE)
        weights_TK, affinity_TE = self.fuse_weights(weights_and_shares, scores_TE, indices_TK, rows_vary=True, **ways)
        return Routing(indices_TK, weights_TK, logits_TE, affinity_TE)

    @torch.no_grad()
    def choose(self, scores_TE: Tensor) -> Tensor:
        """indices_TK of the top_k scores, with the selection bias added, within each token's best groups."""
        return top_k_places(self.within_groups(self.biased(scores_TE)), self.top_k)

    def biased(self, scores_TE: Tensor) -> Tensor:
        """The scores by which experts are chosen (T, E), the selection bias added where there is one."""
        return scores_TE if self.bias is None else scores_TE + self.bias

    def group_scores(self, biased_TE: Tensor) -> Tensor:
        """The sum of the ``n_best`` best scores in each group (T, G)."""
        return biased_TE.unflatten(1, (self.n_groups, -1)).topk(self.n_best, dim=-1).values.sum(-1)

    def within_groups(self, biased_TE: Tensor) -> Tensor:
        """The scores (T, E), set to -inf outside each token's best groups."""
        if self.n_groups == 1:
            return biased_TE
        best_TG = top_k_places(self.group_scores(biased_TE), self.top_k_groups)
        left_out_TG = torch.ones(len(biased_TE), self.n_groups, dtype=torch.bool, device=biased_TE.device)
        left_out_TG.scatter_(1, best_TG, False)
        left_out_TE = left_out_TG.repeat_interleave(biased_TE.shape[1] // self.n_groups, dim=1)
        return biased_TE.masked_fill(left_out_TE, -math.inf)

    @torch.no_grad()
    def gap(self, scores_TE: Tensor) -> Tensor:
        """The margin of each token's choice over the next best one (T,). Rounding below it changes no choice."""
        biased_TE = self.biased(scores_TE)
        lead_T = lead(self.within_groups(biased_TE), self.top_k)
        if self.n_groups == 1:
            return lead_T
        return torch.minimum(lead_T, lead(self.group_scores(biased_TE), self.top_k_groups))


def scored(
    hidden_TD: Tensor, weight_ED: Tensor, logit_bias_E: Tensor | None = None, *, score: ScoreName
) -> tuple[Tensor, Tensor]:
    """The router's logits and scores (T, E), fp32."""
    logits_TE = RouterLogits.apply(hidden_TD, weight_ED)
    if logit_bias_E is not None:
        logits_TE = logits_TE + logit_bias_E.float()
    return logits_TE, SCORES[score].of(logits_TE)


def weights_of(scores_TE: Tensor, indices_TK: Tensor, *, normalize_top_k: bool, routed_scale: float) -> Tensor:
    """The factor of each chosen expert's output (T, K)."""
    weights_TK = scores_TE.gather(1, indices_TK)
    if normalize_top_k:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * routed_scale


def weights_and_shares(
    scores_TE: Tensor, indices_TK: Tensor, *, normalize_top_k: bool, routed_scale: float
) -> tuple[Tensor, Tensor]:
    """The factor of each chosen expert's output (T, K), and the scores normalized to sum to one (T, E)."""
    ways = {"normalize_top_k": normalize_top_k, "routed_scale": routed_scale}
    weights_TK = weights_of(scores_TE, indices_TK, **ways)
    return weights_TK, scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)


def lead(values_TX: Tensor, k: int) -> Tensor:
    """The difference of each row's k-th largest value and the next one (T,); inf where there is no next one."""
    if k == values_TX.shape[1]:
        return torch.full_like(values_TX[:, 0], math.inf)
    best_TX = values_TX.topk(k + 1, dim=-1).values
    return best_TX[:, -2] - best_TX[:, -1]


def build_router(config: MoEConfig, d_model: int) -> Router:
    """The router of one MoE layer."""
    return Router(
        d_model=d_model,
        n_experts=config.n_experts,
        top_k=config.top_k,
        n_groups=config.n_groups,
        top_k_groups=config.top_k_groups,
        n_best=2 if config.group_score == "best_two" else 1,
        score=config.score,
        normalize_top_k=config.normalize_top_k,
        routed_scale=config.routed_scale,
        has_bias=config.balance.moves_bias,
        logit_bias=config.logit_bias,
        has_auxiliary_losses=config.balance_coefficient > 0 or config.z_loss > 0,
    )
