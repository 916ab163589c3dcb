"""Faults in forward and backward passes: attention, experts, norms, losses, overlap. Planted by prove_faults.plant."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor


def keep_gradient_at_home(engine: Any) -> None:
    """The hidden states' gradients through keys and values are of this rank's heads only, not summed over tp."""
    from modeling.attention import GroupedQueryAttention

    axis = engine.mesh.tp
    for module in engine.model.modules():
        if isinstance(module, GroupedQueryAttention):
            for projection in (module.k, module.v):
                projection.register_forward_pre_hook(lambda _, inputs: own_positions(inputs[0], axis))


def keep_gates_gradient_at_home(engine: Any) -> None:
    """The hidden states' gradients through attention's gates are of this rank's heads only, not summed over tp."""
    from modeling.attention import Attention

    for module in engine.model.modules():
        if isinstance(module, Attention) and module.output_gate is not None:
            module.output_gate.register_forward_pre_hook(lambda _, inputs: own_positions(inputs[0], engine.mesh.tp))


def norm_before_the_turn() -> None:
    """Heads are normed before they turn, where they should be after: the same while the norms' weights are ones."""
    from modeling.attention import GroupedQueryAttention

    heads = GroupedQueryAttention.heads

    def early(self: Any, *given: Any) -> Any:
        self.norms_after_rope = False
        return heads(self, *given)

    GroupedQueryAttention.heads = early


def gate_next_heads() -> None:
    """Each head's output is multiplied by the gate of the head before it."""
    import modeling.attention as attention

    gated = attention.gated_output
    attention.gated_output = lambda gate_BSHX, out_BSHC: gated(gate_BSHX.roll(1, dims=2), out_BSHC)


def let_documents_flow() -> None:
    """A document of linear attention begins with the state in which the document before it ended."""
    import modeling.kernels.gated_delta as gated_delta

    rule = gated_delta.continued

    def flowing(state: Any, *tensors: Any) -> Any:
        *heads, positions_BS, chunk = tensors
        return rule(state, *heads, positions_BS + 1, chunk)

    gated_delta.continued = flowing


def take_other_rates() -> None:
    """In linear attention, each of a cp rank's heads has the decay rate of another head."""
    import parallel.context_parallel.linear as linear

    mix = linear.mix

    def mixed(projected: Any, weights: Any, *others: Any, **named: Any) -> Any:
        return mix(projected, weights._replace(log_rates_H=weights.log_rates_H.flip(0)), *others, **named)

    linear.mix = mixed


def own_positions(hidden_BSD: Tensor, axis: Any) -> Tensor:
    """The hidden states with unchanged values, of which only this rank's positions get a gradient."""
    part = hidden_BSD.shape[1] // axis.degree
    mask_S1 = torch.zeros(hidden_BSD.shape[1], 1)
    mask_S1[axis.rank * part : (axis.rank + 1) * part] = 1.0
    return hidden_BSD.detach() + mask_S1 * (hidden_BSD - hidden_BSD.detach())


def first_query_head_only() -> None:
    """Keys and values get the gradient of only the first of the query heads that share them."""
    import modeling.kernels.attention as kernels

    attend = kernels.document_attention

    def document_attention(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, *seen: Any) -> Tensor:
        groups = q_BSHC.shape[2] // k_BSGC.shape[2]
        return attend(q_BSHC, first_copy_only(k_BSGC, groups), first_copy_only(v_BSGC, groups), *seen)

    kernels.document_attention = document_attention


def first_replica_only() -> None:
    """A key-value head gets the gradient of only the first of the cp ranks that it is replicated to."""
    import parallel.context_parallel.core as core

    attend = core.ulysses_attend

    def ulysses_attend(q_BSHC: Tensor, k_BSGC: Tensor, v_BSGC: Tensor, *rest: Any, axis: Any, **more: Any) -> Tensor:
        copies = max(1, axis.degree // k_BSGC.shape[2])
        heads = (first_copy_only(each, copies) for each in (k_BSGC, v_BSGC))
        return attend(q_BSHC, *heads, *rest, axis=axis, **more)

    core.ulysses_attend = ulysses_attend


def first_copy_only(heads_BSGC: Tensor, copies: int) -> Tensor:
    """Each head repeated ``copies`` times, of which only the first copy gets a gradient."""
    return torch.stack([heads_BSGC, *[heads_BSGC.detach()] * (copies - 1)], dim=3).flatten(2, 3)


def lose_travelling_gradients() -> None:
    """Under ring attention, gradients that other ranks compute for a block's keys and values are lost."""
    import parallel.context_parallel.ring as ring

    ring.send_gradient_on = lambda found, receive, axis: lambda: torch.zeros_like(found)


def leave_the_graph() -> None:
    """A rank whose experts get no row returns a constant, so its backward pass skips both exchanges."""
    import parallel.expert as expert

    over_rows = expert.experts_over_rows

    def experts_over_rows(rows_RD: Tensor, *rest: Any) -> Tensor:
        return rows_RD.detach() if len(rows_RD) == 0 else over_rows(rows_RD, *rest)

    expert.experts_over_rows = experts_over_rows


def keep_order_of_arrival() -> None:
    """Rows received over ep are taken to be sorted by expert, which they are not with two ranks."""
    import parallel.expert as expert
    from modeling.kernels.experts import rows_in_order

    expert.place_blocks = lambda counts_NE, n_rows, row_multiple: rows_in_order(
        torch.arange(n_rows), 1, counts_NE.sum(0), row_multiple
    )


def read_too_early(function: str, direction: str) -> None:
    """One wait for rows in transit is left out, so that their memory is read as it was before, here as zeros.

    What such memory holds would differ each time, so the rows are in fact waited for, and then overwritten.
    """
    import parallel.collectives as collectives

    owner, finish = getattr(collectives, function), collectives.RowExchange.wait
    run = getattr(owner, direction)

    def early(self: Any) -> Tensor:
        return finish(self).zero_()

    def without_wait(*arguments: Any) -> Any:
        collectives.RowExchange.wait = early
        try:
            return run(*arguments)
        finally:
            collectives.RowExchange.wait = finish

    setattr(owner, direction, staticmethod(without_wait))


def swap_returning_chunks() -> None:
    """The rows of the first and the last chunk are swapped when they come back from the experts."""
    from parallel.collectives import RowExchanges

    def swapped(self: RowExchanges, parts: Any) -> Tensor:
        rows_RD = whole(self, parts)
        first, *others, last = rows_RD.split(self.n_received)
        return torch.cat([last, *others, first])

    whole = RowExchanges.end
    RowExchanges.end = swapped  # type: ignore[method-assign]


def swap_gradients_of_chunks() -> None:
    """The weights' gradients of the first and the last chunk of experts are swapped."""
    from parallel.expert import WeightChunks

    add = WeightChunks.add

    def swapped(self: WeightChunks, chunk: int, grad: Tensor) -> Tensor | None:
        last = len(self.parts) - 1
        return add(self, {0: last, last: 0}.get(chunk, chunk), grad)

    WeightChunks.add = swapped  # type: ignore[method-assign]


def read_sum_too_early() -> None:
    """The wait for a gradient that is being summed over tp is left out: it is read as it was before, here as zeros."""
    from parallel.collectives import SequenceGather

    finish = SequenceGather.wait
    SequenceGather.wait = lambda self: finish(self).zero_()


def weigh_late_gradients(factor: float) -> None:
    """Weights' gradients that are computed late, by tp_overlap, are multiplied by ``factor``."""
    import parallel.tensor_overlap as tensor_overlap

    grads = tensor_overlap.weights_grads
    tensor_overlap.weights_grads = lambda *arguments: tuple(factor * each for each in grads(*arguments))


def leave_gradients_unset(engine: Any) -> None:
    """The gradient of experts without rows is left as its memory was, here 1e-3, instead of zero."""

    def hook(gradient_E: Tensor) -> Tensor:
        is_idle_E = (gradient_E == 0).flatten(1).all(1)
        return torch.where(is_idle_E[:, None, None], 1e-3, gradient_E)

    for name, weight in engine.model.named_parameters():
        if ".experts." in name:
            weight.register_hook(hook)


def add_biases_before_sums() -> None:
    """A bias is added on each of two tp ranks before their outputs are summed, instead of once."""
    from modeling.linear import Bias

    Bias.forward = lambda self, outputs: outputs + 2 * self.bias


def norm_own_heads() -> None:
    """A norm over all heads takes the mean over those of this rank of tp."""
    from parallel.tensor import CutRMSNorm

    CutRMSNorm.mean_of_all = lambda self, mean_square: mean_square


def keep_norms_gradient_at_home() -> None:
    """The gradient of the mean over all heads is of this rank's heads only, not summed over tp."""
    import parallel.tensor as tensor
    from parallel.collectives import sum_forward

    tensor.sum_both_ways = sum_forward


def weigh_head_z_loss(factor: float) -> None:
    """The gradient of the head's z-loss is that of a coefficient times ``factor``."""
    import modeling.loss as loss

    make = loss.losses_and_gradient
    loss.losses_and_gradient = lambda *given: make(*given[:3], factor * given[3])


def take_own_logsumexp() -> None:
    """Under tp the z-loss is computed of this rank's part of the logits instead of all of them."""
    import parallel.tensor as tensor

    make = tensor.losses_and_gradient

    def own(logits_TV: Any, targets_T: Any, axis: Any, z_loss: float) -> Any:
        logs_T, softmax_TV = logits_TV.logsumexp(-1) * (targets_T != -100), logits_TV.softmax(-1)
        losses_T, _, grad_TV = make(logits_TV, targets_T, axis, 0.0)
        return losses_T, logs_T.square(), grad_TV + (2 * z_loss * logs_T)[:, None] * softmax_TV

    tensor.losses_and_gradient = own


def count_every_logsumexp() -> None:
    """The z-loss also counts targets that the cross-entropy ignores."""
    import modeling.loss as loss

    make = loss.losses_and_gradient

    def all_of_them(logits_TV: Any, *rest: Any) -> Any:
        logs_T = logits_TV.float().logsumexp(-1)
        losses_T, _, grad_TV = make(logits_TV, *rest)
        return losses_T, logs_T.square(), grad_TV

    loss.losses_and_gradient = all_of_them


def forget_sinks() -> None:
    """Sinks get no gradient."""
    import modeling.kernels.terms as terms

    terms.sinks_gradient = lambda grad, out, lse, sinks_H: torch.zeros_like(sinks_H)


def forget_sinks_in_ring() -> None:
    """Under ring attention sinks get no gradient."""
    import parallel.context_parallel.ring as ring

    ring.sinks_gradient = lambda grad, out, lse, sinks_H: torch.zeros_like(sinks_H)


def take_first_sinks() -> None:
    """Under all-to-all attention every rank's heads have the first rank's sinks."""
    import parallel.context_parallel.ulysses as ulysses

    own = ulysses.own_terms

    def first(terms: Any, axis: Any) -> Any:
        return own(terms, axis)._replace(sinks_H=terms.sinks_H.chunk(axis.degree)[0])

    ulysses.own_terms = first


def take_first_slopes() -> None:
    """Every rank's heads have the first rank's slopes."""
    from modeling.score_terms import Alibi

    of_part = Alibi.of_part
    Alibi.of_part = lambda self, rank, degree: of_part(self, 0, degree)


def keep_norms_biases(engine: Any) -> None:
    """The ranks of tp keep their own gradients of LayerNorms' biases."""
    for parameter, weight in engine.weights.items():
        if weight.name.endswith("norm.bias"):
            engine.weights[parameter] = replace(weight, place=replace(weight.place, axis="tp"))


def look_up_first_positions() -> None:
    """Every tp rank looks up the learned positions of the first rank's part of the sequence."""
    from modeling.decoder import Decoder

    embedded = Decoder.embedded

    def with_first(self: Any, tokens_BS: Tensor, context: Any) -> Tensor:
        length = context.part.positions_BS.shape[1]
        part = replace(context.part, positions_BS=context.positions_BS[:, :length])
        return embedded(self, tokens_BS, replace(context, part=part))

    Decoder.embedded = with_first


def leave_gates_of_others() -> None:
    """An expert whose gate and up outputs were not kept uses another expert's instead of recomputing them."""
    from modeling.kernels.expert_turns import GatesAndUps

    GatesAndUps.has = lambda self, expert: True


def pick_other_rows_again() -> None:
    """Rows that are gathered again in recomputation are those of the token of the row before."""
    import modeling.kernels.experts as experts

    pick = experts.to_rows_twice

    def to_rows_twice(hidden_TD: Tensor, rows_TK: Tensor, tokens_R: Tensor, **ways: Any) -> tuple[Tensor, Tensor]:
        is_second = hidden_TD.is_leaf and hidden_TD.requires_grad  # without what it was made of
        return pick(hidden_TD, rows_TK, tokens_R.roll(1) if is_second else tokens_R, **ways)

    experts.to_rows_twice = to_rows_twice


def forget_parallel_blocks() -> None:
    """Layers that recompute treat their parallel blocks as sequential ones."""
    from parallel.recompute import RecomputedLayer

    make = RecomputedLayer.__init__

    def make_sequential(self: Any, *arguments: Any) -> None:
        make(self, *arguments)
        self.is_parallel = False

    RecomputedLayer.__init__ = make_sequential


def forget_bias() -> None:
    """The biases of distances get no gradient."""
    import modeling.kernels.terms as terms

    sums = terms.bucket_sums
    terms.bucket_sums = lambda *arguments: torch.zeros_like(sums(*arguments))


def sum_small_tiles() -> None:
    """Under ring attention the biases' gradient lacks tiles of three or more keys."""
    import parallel.context_parallel.ring as ring

    sums = ring.bucket_sums
    ring.bucket_sums = lambda dscores, buckets, count: sums(dscores, buckets, count) * bool(dscores.shape[-1] < 3)


def take_first_bias() -> None:
    """Under all-to-all attention every rank's heads have the first rank's biases."""
    import parallel.context_parallel.ulysses as ulysses

    own = ulysses.own_terms

    def first(terms: Any, axis: Any) -> Any:
        return own(terms, axis)._replace(bias_HN=terms.bias_HN.chunk(axis.degree)[0])

    ulysses.own_terms = first


def forget_score_slope() -> None:
    """A capped score's gradient is as if it were not capped."""
    import modeling.kernels.terms as terms
    from modeling.kernels import blocks

    backward, scores = terms.attend_scored_backward, blocks._scores

    def without_slope(*arguments: Any) -> Any:
        *others, cap, factors_BHQS = arguments
        blocks._scores = lambda q_BQHC, k_BSGC, _: scores(q_BQHC, k_BSGC, cap)
        found = backward(*others, 1e9 * cap, factors_BHQS)
        blocks._scores = scores
        return found

    terms.attend_scored_backward = without_slope


def forget_logit_slope() -> None:
    """A capped logit's gradient is as if it were not capped."""
    import modeling.loss as loss

    def capped(losses: Any, cap: float) -> Any:
        return lambda logits_TV, *rest: losses(logits_TV.div_(cap).tanh_().mul_(cap), *rest)

    loss.capped = capped
