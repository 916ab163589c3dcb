"""Recomputation: activations dropped in the forward pass and computed again in the backward.

full keeps only each layer's input. feed_forward drops the feed-forward half of each layer (norm, router, experts) and
keeps attention. selective drops what norms, rotations, gates and the router make, and keeps what they are made of; of
products it computes only the router's and those of keys and values again. No torch checkpoint: its reentrant kind, and
its policies over single operators, fail under zero-bubble schedules, and the other kind runs the forward pass again for
each of their parts. A layer that runs again keeps what its router chose, so that computing again routes alike.
"""

from collections.abc import Callable
from typing import Literal, assert_never

from torch import Tensor

from modeling.attention import Attention, GroupedQueryAttention
from modeling.context import Context
from modeling.decoder import Decoder, DecoderLayer
from modeling.feed_forward import FeedForward
from modeling.kv_cache import LayerCache
from modeling.moe import Experts, RoutingStats
from modeling.norm import LayerNorm, RMSNorm
from modeling.router import Router
from parallel.remake import Remaker, remade

Recompute = Literal["none", "selective", "feed_forward", "full"]
Modes = tuple[Recompute, ...]  # what each layer of the model recomputes, by its number
Passed = tuple[Tensor, RoutingStats | None]  # what a layer, or half of one, returns


def apply_recompute(model: Decoder, recompute: Recompute | Modes, *, weights_stay: bool = True) -> None:
    """Puts layers that recompute what ``recompute`` names, for all or for each of them, in the layers' places.

    Changes no value. Ranks that share a stage must name the same: under ZeRO 3 they gather weights in one order.
    ``weights_stay``: whether weights stay in memory from the forward to the backward pass (not under ZeRO 3).
    """
    modes: dict[str, Recompute] = {name: mode_of(recompute, int(name)) for name in model.layers}
    if "selective" in modes.values() and model.final_norm is not None:
        model.final_norm.fuse = Remaker(weights_stay=weights_stay).alone(model.final_norm.fuse)
    for number, layer in model.layers.items():
        assert isinstance(layer, DecoderLayer)
        mode = modes[number]
        match mode:
            case "none":
                continue
            case "selective":
                model.layers[number] = ProductsKeptLayer(layer, weights_stay=weights_stay)
            case "feed_forward":
                model.layers[number] = HalfRecomputedLayer(layer)
            case "full":
                model.layers[number] = FullyRecomputedLayer(layer)
            case _:
                assert_never(mode)


def mode_of(recompute: Recompute | Modes, layer: int) -> Recompute:
    """What a layer recomputes."""
    return recompute[layer] if isinstance(recompute, tuple) else recompute


class RecomputedLayer(DecoderLayer):
    """A layer of another's modules; its kinds below say what of it is computed again."""

    def __init__(self, layer: DecoderLayer) -> None:
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

    def run(self, function: Callable[..., Passed], *hidden: Tensor, context: Context) -> Passed:
        """What ``function`` makes of ``hidden``. The second run takes the experts that the first one chose."""
        chosen: dict[int, Tensor] = {}

        def choosing_once(*hidden: Tensor) -> Passed:
            passed_BSD, stats = function(*hidden, context.replaying(chosen))
            if stats is not None:
                chosen[self.layer] = stats.choice_TK
            return passed_BSD, stats

        return remade(choosing_once)(*hidden)


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


class ProductsKeptLayer(RecomputedLayer):
    """Keeps what goes into its chains of elementwise work, and what its products put out.

    Keys and values are products again: few channels, where heads share them. Not under ZeRO 3, where their weights are
    not there when attention's backward pass wants them.
    """

    def __init__(self, layer: DecoderLayer, *, weights_stay: bool) -> None:
        super().__init__(layer)
        self.remaker = Remaker(weights_stay=weights_stay)
        for module in self.modules():
            if isinstance(module, RMSNorm | LayerNorm | Attention | FeedForward | Experts | Router):
                module.fuse = self.remaker.around(module.fuse)
        if weights_stay and isinstance(layer.attention, GroupedQueryAttention):
            for projection in (layer.attention.k, layer.attention.v):
                projection.fuse = self.remaker.around(projection.fuse)

    def forward(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Passed:
        """As DecoderLayer."""
        with self.remaker.within(self):
            return super().forward(hidden_BSD, context, cache)
