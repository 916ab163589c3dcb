"""Recomputation: activations dropped in the forward pass and computed again in the backward.

full keeps only each layer's input. selective drops the feed-forward half of each layer (norm, router, experts), which
holds most of the
memory for each FLOP spent, and keeps attention. Both checkpoint non-reentrantly (the reentrant kind, and torch's
policies
over single operators, fail under zero-bubble schedules). Routers' choices are kept in the Context, so recomputing
reuses them.
"""

from collections.abc import Callable
from typing import Any, Literal, assert_never

from torch.utils.checkpoint import checkpoint

from modeling.decoder import Decoder, DecoderLayer


def apply_recompute(model: Decoder, recompute: Literal["none", "selective", "full"]) -> None:
    """Makes every layer recompute what ``recompute`` names. Changes no value."""
    for layer in model.layers.values():
        assert isinstance(layer, DecoderLayer)
        match recompute:
            case "none":
                pass
            case "selective":
                layer.add_feed_forward = recomputed(layer.add_feed_forward)
            case "full":
                layer.forward = recomputed(layer.forward)
            case _:
                assert_never(recompute)


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose intermediate results are not kept for the backward pass."""

    def run(*arguments: Any) -> Any:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    return run
