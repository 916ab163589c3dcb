"""Recomputation: activations dropped in the forward pass and computed again in the backward.

full keeps only each layer's input. selective drops the feed-forward half of each layer (norm, router, experts), which
holds most of the memory for each FLOP spent, and keeps attention. Both checkpoint non-reentrantly (the reentrant kind,
and torch's policies over single operators, fail under zero-bubble schedules). A layer keeps what its router chose, so
that computing again routes alike.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from modeling.context import Context
from modeling.decoder import Decoder, DecoderLayer
from modeling.kv_cache import LayerCache
from modeling.moe import RoutingStats

Recompute = Literal["none", "selective", "full"]
Passed = tuple[Tensor, RoutingStats | None]  # what a layer, or half of one, returns


def apply_recompute(model: Decoder, recompute: Recompute, *, splits_backward: bool = False) -> None:
    """Puts layers that recompute what ``recompute`` names in the layers' places. Changes no value.

    ``splits_backward``: the pipeline's schedule goes through a layer's backward pass in several parts.
    """
    if recompute == "none":
        return
    again = recomputed_for_parts if splits_backward else recomputed
    for number, layer in model.layers.items():
        assert isinstance(layer, DecoderLayer)
        twin = FullyRecomputedLayer if recompute == "full" else HalfRecomputedLayer
        model.layers[number] = twin(layer, again)


class RecomputedLayer(DecoderLayer):
    """A layer of another's modules; its kinds below say what of it is computed again."""

    def __init__(self, layer: DecoderLayer, again: "Again") -> None:
        super().__init__(
            layer.layer,
            layer.attention_norm,
            layer.attention,
            layer.feed_forward_norm,
            layer.feed_forward,
            norms_outputs=layer.norms_outputs,
            is_parallel=layer.is_parallel,
            attention_post_norm=layer.attention_post_norm,
            feed_forward_post_norm=layer.feed_forward_post_norm,
            residual_scale=layer.residual_scale,
            residual_dropout=layer.residual_dropout,
        )
        self.again = again

    def run(self, function: Callable[..., Passed], *hidden: Tensor, context: Context) -> Passed:
        """What ``function`` makes of ``hidden``. The second run takes the experts that the first one chose."""
        chosen: dict[int, Tensor] = {}

        def choosing_once(*hidden: Tensor) -> Passed:
            passed_BSD, stats = function(*hidden, context.replaying(chosen))
            if stats is not None:
                chosen[self.layer] = stats.choice_TK
            return passed_BSD, stats

        return self.again(choosing_once)(*hidden)


class FullyRecomputedLayer(RecomputedLayer):
    """Keeps its input alone."""

    def forward(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Passed:
        """As DecoderLayer."""
        whole = super().forward
        return self.run(lambda hidden_BSD, context: whole(hidden_BSD, context, cache), hidden_BSD, context=context)


class HalfRecomputedLayer(RecomputedLayer):
    """Keeps the attention's half, and the input of the feed-forward half."""

    def add_feed_forward(self, hidden_BSD: Tensor, seen_BSD: Tensor, context: Context) -> Passed:
        """As DecoderLayer."""
        return self.run(super().add_feed_forward, hidden_BSD, seen_BSD, context=context)


Again = Callable[[Callable[..., Any]], Callable[..., Any]]  # of a function, one that recomputes


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, whose intermediate results are not kept for the backward pass but computed again in it."""

    def run(*arguments: Any) -> Any:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    return run


def recomputed_for_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """As ``recomputed``, but what is computed again serves every part of the backward pass, until its graph goes.

    torch computes a stage's weight gradients by one backward pass for each group of weights, and its own checkpoint
    runs the forward pass anew for each of them: 16 times a layer in a stage of two.
    """

    def run(*arguments: Any) -> Any:
        call = _Call(function, arguments)
        with saved_tensors_hooks(call.drop, call.bring):
            return function(*arguments)

    return run


class _Enough(Exception):
    """Every tensor that the backward pass needs is there."""


class _Call:
    """One call of a function, and the tensors that autograd saved in it, in order: first dropped, then made again."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.n_saved = 0
        self.made: list[Tensor] = []

    def drop(self, _: Tensor) -> int:
        """Keeps a number in the tensor's place."""
        self.n_saved += 1
        return self.n_saved - 1

    def bring(self, number: int) -> Tensor:
        """The tensor of that number."""
        if not self.made:
            self.make()
        return self.made[number]

    def make(self) -> None:
        """Runs the function again, up to the last tensor that it saved."""

        def keep(tensor: Tensor) -> Tensor:
            value = tensor.detach()  # the second run's own graph is not used; holding on to it would be a cycle
            self.made.append(value)
            if len(self.made) == self.n_saved:
                raise _Enough
            return value

        try:
            with saved_tensors_hooks(keep, lambda tensor: tensor), torch.enable_grad():
                self.function(*self.arguments)
        except _Enough:
            return
        raise AssertionError(f"the second run saved {len(self.made)} tensors, the first {self.n_saved}")
