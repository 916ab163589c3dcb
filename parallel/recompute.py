"""Recomputation: activations dropped in the forward pass and computed again in the backward.

full keeps only each layer's input. selective drops the feed-forward half of each layer (norm, router, experts), which
holds most of the memory for each FLOP spent, and keeps attention. Both checkpoint non-reentrantly (the reentrant kind,
and torch's policies over single operators, fail under zero-bubble schedules). Routers' choices are kept in the Context,
so recomputing reuses them.
"""

from collections.abc import Callable
from typing import Any, Literal, assert_never

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from modeling.decoder import Decoder, DecoderLayer


def apply_recompute(
    model: Decoder, recompute: Literal["none", "selective", "full"], *, splits_backward: bool = False
) -> None:
    """Makes every layer recompute what ``recompute`` names. Changes no value.

    ``splits_backward``: the pipeline's schedule goes through a layer's backward pass in several parts.
    """
    again = recomputed_for_parts if splits_backward else recomputed
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        match recompute:
            case "none":
                pass
            case "selective":
                layer.add_feed_forward = again(layer.add_feed_forward)
            case "full":
                layer.forward = again(layer.forward)
            case _:
                assert_never(recompute)


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose intermediate results are not kept for the backward pass."""

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
