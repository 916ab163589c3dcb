"""Recomputation: activations dropped in the forward pass and computed again in the backward.

full keeps only each layer's input. feed_forward drops the feed-forward half of each layer (norm, router, experts) and
what attention's norm puts out, and keeps the rest of attention. selective drops what norms, rotations, gates and the
router make, and keeps what they are made of; of products it computes the router's and those of queries, keys and values
again, and where experts go one after another half of their gates and ups. No torch checkpoint: its reentrant kind, and
its policies over single operators, fail under zero-bubble schedules, and the other kind runs the forward pass again for
each of their parts. A layer that runs again keeps what its router chose, so that computing again routes alike.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal, assert_never

from torch import Tensor

from modeling.attention import GroupedQueryAttention
from modeling.context import Context
from modeling.decoder import Decoder, DecoderLayer
from modeling.feed_forward import FeedForward
from modeling.kv_cache import LayerCache
from modeling.linear_attention import GatedNorm
from modeling.mixer import Mixer
from modeling.moe import Experts, RoutingStats
from modeling.norm import Norm
from modeling.router import Router
from parallel.offload import Offloader
from parallel.remake import Keep, Remaker, remade

Recompute = Literal["none", "selective", "feed_forward", "full"]
KEPT_SHARE = 0.5  # of experts' gates and ups under ``selective``, on a CPU: docs/speed.md has what that costs
Modes = tuple[Recompute, ...]  # what each layer of the model recomputes, by its number
Passed = tuple[Tensor, RoutingStats | None]  # what a layer, or half of one, returns


def apply_recompute(
    model: Decoder, recompute: Recompute | Modes, *, weights_stay: bool = True, offloader: Offloader | None = None
) -> None:
    """Puts layers that recompute what ``recompute`` names, for all or for each of them, in the layers' places.

    Changes no value. Ranks that share a stage must name the same: under ZeRO 3 they gather weights in one order.
    ``weights_stay``: whether weights stay in memory from the forward to the backward pass (not under ZeRO 3).
    ``offloader``: what takes the tensors that layers keep to the host; None: they stay on the device.
    """
    modes: dict[str, Recompute] = {name: mode_of(recompute, int(name)) for name in model.layers}
    if "selective" in modes.values() and model.final_norm is not None:
        model.final_norm.fuse = Remaker(weights_stay=weights_stay).alone(model.final_norm.fuse)
    for number, layer in model.layers.items():
        assert isinstance(layer, DecoderLayer)
        mode = modes[number]
        match mode:
            case "none":
                if offloader is not None:
                    model.layers[number] = TwinLayer(layer, offloader)
            case "selective":
                model.layers[number] = ProductsKeptLayer(layer, offloader, weights_stay=weights_stay)
            case "feed_forward":
                model.layers[number] = HalfRecomputedLayer(layer, offloader, weights_stay=weights_stay)
            case "full":
                model.layers[number] = FullyRecomputedLayer(layer, offloader)
            case _:
                assert_never(mode)


def offloader_in(model: Decoder) -> Offloader | None:
    """What takes to the host what a model's layers keep; None: it stays on the device."""
    twins = [layer for layer in model.layers.values() if isinstance(layer, TwinLayer)]
    return twins[0].offloader if twins else None


def mode_of(recompute: Recompute | Modes, layer: int) -> Recompute:
    """What a layer recomputes."""
    return recompute[layer] if isinstance(recompute, tuple) else recompute


class TwinLayer(DecoderLayer):
    """A layer of another's modules, which keeps on the host what it would keep on the device."""

    def __init__(self, layer: DecoderLayer, offloader: Offloader | None = None) -> None:
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
        self.offloader = offloader

    @property
    def keep(self) -> Keep:
        """What becomes of a tensor that is needed in the backward pass."""
        return Tensor.detach if self.offloader is None else self.offloader.keep

    def forward(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Passed:
        """As DecoderLayer."""
        with nullcontext() if self.offloader is None else self.offloader.during(self, context):
            return self.compute(hidden_BSD, context, cache)

    def compute(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None) -> Passed:
        """``forward`` of the layer in whose place this one is."""
        return super().forward(hidden_BSD, context, cache)


class RecomputedLayer(TwinLayer):
    """A layer that computes parts of itself again; its kinds below say which."""

    def run(self, function: Callable[..., Passed], *hidden: Tensor, context: Context) -> Passed:
        """What ``function`` makes of ``hidden``. The second run takes the experts that the first one chose."""
        chosen: dict[int, Tensor] = {}

        def choosing_once(*hidden: Tensor) -> Passed:
            passed_BSD, stats = function(*hidden, context.replaying(chosen))
            if stats is not None:
                chosen[self.layer] = stats.choice_TK
            return passed_BSD, stats

        return remade(choosing_once, self.keep)(*hidden)


class FullyRecomputedLayer(RecomputedLayer):
    """A layer that keeps its input alone."""

    def __init__(self, layer: DecoderLayer, offloader: Offloader | None) -> None:
        super().__init__(layer, offloader)
        keep_gates_and_ups(self, share_of_second_run(self))

    def compute(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None) -> Passed:
        """As TwinLayer."""
        whole = super().compute
        return self.run(lambda hidden_BSD, context: whole(hidden_BSD, context, cache), hidden_BSD, context=context)


class RemakingLayer(RecomputedLayer):
    """Makes chains of elementwise work again: of those that its kinds below put ``remaker`` around."""

    def __init__(self, layer: DecoderLayer, offloader: Offloader | None, *, weights_stay: bool) -> None:
        super().__init__(layer, offloader)
        self.remaker = Remaker(weights_stay=weights_stay, keep=self.keep)

    def compute(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None) -> Passed:
        """As TwinLayer."""
        with self.remaker.within(self):
            return super().compute(hidden_BSD, context, cache)


class HalfRecomputedLayer(RemakingLayer):
    """Keeps the attention's half but for what its norm puts out, and the input of the feed-forward half."""

    def __init__(self, layer: DecoderLayer, offloader: Offloader | None, *, weights_stay: bool) -> None:
        super().__init__(layer, offloader, weights_stay=weights_stay)
        self.attention_norm.fuse = self.remaker.around(self.attention_norm.fuse)
        keep_gates_and_ups(self, share_of_second_run(self))

    def add_feed_forward(self, hidden_BSD: Tensor, seen_BSD: Tensor, context: Context) -> Passed:
        """As DecoderLayer."""
        return self.run(super().add_feed_forward, hidden_BSD, seen_BSD, context=context)


class ProductsKeptLayer(RemakingLayer):
    """Keeps what goes into its chains of elementwise work, and what its products put out.

    Queries, keys, values and gates of attention are products again, the cheapest for the bytes that they save. Not
    under ZeRO 3, where their weights are not there when attention's backward pass wants them.
    """

    def __init__(self, layer: DecoderLayer, offloader: Offloader | None, *, weights_stay: bool) -> None:
        super().__init__(layer, offloader, weights_stay=weights_stay)
        for module in self.modules():
            if isinstance(module, Norm | GatedNorm | Mixer | FeedForward | Experts | Router):
                module.fuse = self.remaker.around(module.fuse)
        keep_gates_and_ups(self, KEPT_SHARE)
        if weights_stay and isinstance(layer.attention, GroupedQueryAttention):
            attention = layer.attention
            for projection in (attention.q, attention.k, attention.v, attention.output_gate):
                if projection is not None:
                    projection.fuse = self.remaker.around(projection.fuse)


def keep_gates_and_ups(layer: DecoderLayer, share: float) -> None:
    """Experts that go one after another keep what their products by gate and up put out for that share of the rows."""
    for module in layer.modules():
        if isinstance(module, Experts):
            module.kept_share = share


def share_of_second_run(layer: DecoderLayer) -> float:
    """The share where the layer's half with the experts runs again.

    With 0 the second run stops before its experts, which multiply again in their own backward pass; where something of
    the layer behind them is kept it would compute them, too, so they keep all.
    """
    ends = not layer.norms_outputs and layer.feed_forward_post_norm is None and not layer.residual_dropout
    return 0.0 if ends else 1.0
