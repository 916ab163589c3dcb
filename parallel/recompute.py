"""Activation recomputation: activations are dropped in the forward pass and computed again in the backward pass.

``full`` keeps only each layer's input. ``feed_forward`` drops the feed-forward half of each layer (norm, router,
experts) and the output of attention's norm, and keeps the rest of attention. ``selective`` drops the outputs of norms,
rotations and gates, and keeps their inputs; of matrix products it computes again those of queries, keys, values and the
router's scores, or, where experts are computed one after another (on CPUs), most of their gates and ups.

torch.utils.checkpoint is not used: its reentrant kind, and its policies over single operators, fail under zero-bubble
schedules, and the other kind runs the forward pass again for each part of a backward pass. A layer that is computed
again keeps its router's choices, so that the second run sends tokens to the same experts.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, assert_never

from torch import Tensor

from modeling.attention import GroupedQueryAttention
from modeling.context import Context
from modeling.decoder import Decoder, DecoderLayer
from modeling.feed_forward import FeedForward
from modeling.kernels.fuse import Fuse
from modeling.kv_cache import LayerCache
from modeling.linear_attention import GatedNorm
from modeling.mixer import Mixer
from modeling.moe import Experts, RoutingStats
from modeling.norm import Norm
from modeling.router import Router
from parallel.offload import Offloader
from parallel.remake import Keep, Remaker, remade

Recompute = Literal["none", "selective", "feed_forward", "full"]
# Of experts' gates and ups, kept under ``selective`` on a CPU; docs/measurements.md has the cost.
KEPT_SHARE = 0.1
Modes = tuple[Recompute, ...]  # what each layer of the model recomputes, by its number
Passed = tuple[Tensor, RoutingStats | None]  # what a layer, or half of one, returns


def apply_recompute(
    model: Decoder, recompute: Recompute | Modes, *, weights_stay: bool = True, offloader: Offloader | None = None
) -> None:
    """Replaces the model's layers by ones that recompute what ``recompute`` names, for all layers or for each.

    Changes no value. Ranks that share a stage must pass the same, since under ZeRO 3 they gather weights in one order.
    ``weights_stay``: whether weights stay in memory from the forward to the backward pass (not under ZeRO 3).
    ``offloader``: copies the tensors that layers keep to the host; None: they stay on the device.
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
    """The offloader that copies the activations of the model's layers to the host; None: they stay on the device."""
    twins = [layer for layer in model.layers.values() if isinstance(layer, TwinLayer)]
    return twins[0].offloader if twins else None


def mode_of(recompute: Recompute | Modes, layer: int) -> Recompute:
    """The mode of the layer with this number in the whole model."""
    return recompute[layer] if isinstance(recompute, tuple) else recompute


class TwinLayer(DecoderLayer):
    """A decoder layer with another one's modules, whose kept activations go to the host if there is an offloader."""

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
        """Turns a tensor that the backward pass needs into what is held of it until then."""
        return Tensor.detach if self.offloader is None else self.offloader.keep

    def forward(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Passed:
        """The layer's output, as DecoderLayer computes it, with its saved tensors handed to the offloader if any."""
        with nullcontext() if self.offloader is None else self.offloader.during(self, context):
            return self.compute(hidden_BSD, context, cache)

    def compute(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None) -> Passed:
        """The layer's output by the forward pass of DecoderLayer; subclasses recompute parts of it."""
        return super().forward(hidden_BSD, context, cache)


class RecomputedLayer(TwinLayer):
    """A layer that computes parts of itself again in the backward pass; its subclasses say which."""

    def run(self, function: Callable[..., Passed], *hidden: Tensor, context: Context) -> Passed:
        """``function`` of ``hidden``, computed again in the backward pass with the experts that the first run chose."""
        chosen: dict[int, Tensor] = {}

        def choosing_once(*hidden: Tensor) -> Passed:
            passed_BSD, stats = function(*hidden, context.replaying(chosen))
            if stats is not None:
                chosen[self.layer] = stats.choice_TK
            return passed_BSD, stats

        return remade(choosing_once, self.keep)(*hidden)


class FullyRecomputedLayer(RecomputedLayer):
    """A layer that keeps only its input, and computes all else again in the backward pass."""

    def __init__(self, layer: DecoderLayer, offloader: Offloader | None) -> None:
        super().__init__(layer, offloader)
        keep_gates_and_ups(self, share_of_second_run(self))

    def compute(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None) -> Passed:
        """The layer's output; the whole layer is computed again in the backward pass."""
        whole = super().compute
        return self.run(lambda hidden_BSD, context: whole(hidden_BSD, context, cache), hidden_BSD, context=context)


class RemakingLayer(RecomputedLayer):
    """A layer that makes chains of elementwise work again; its subclasses say of which modules, through ``remaker``."""

    def __init__(self, layer: DecoderLayer, offloader: Offloader | None, *, weights_stay: bool) -> None:
        super().__init__(layer, offloader)
        self.remaker = Remaker(weights_stay=weights_stay, keep=self.keep)

    def compute(self, hidden_BSD: Tensor, context: Context, cache: LayerCache | None) -> Passed:
        """The layer's output, computed while ``remaker`` replaces the chains' saved tensors."""
        with self.remaker.within(self):
            return super().compute(hidden_BSD, context, cache)


class HalfRecomputedLayer(RemakingLayer):
    """Keeps the attention half's tensors, except its norm's output, and of the feed-forward half only the input."""

    def __init__(self, layer: DecoderLayer, offloader: Offloader | None, *, weights_stay: bool) -> None:
        super().__init__(layer, offloader, weights_stay=weights_stay)
        self.attention_norm.fuse = self.remaker.around(self.attention_norm.fuse)
        keep_gates_and_ups(self, share_of_second_run(self))

    def add_feed_forward(self, hidden_BSD: Tensor, seen_BSD: Tensor, context: Context) -> Passed:
        """The layer's output after its feed-forward half, which is computed again in the backward pass."""
        return self.run(super().add_feed_forward, hidden_BSD, seen_BSD, context=context)


class ProductsKeptLayer(RemakingLayer):
    """Keeps the inputs of its chains of elementwise work, and the outputs of its matrix products.

    The products of queries, keys, values, gates of attention and the router's scores are computed again, as the
    cheapest for the bytes that they save; under ZeRO 3 only the router's, since attention's weights are not in memory
    when its backward pass needs them, and none in a layer whose experts are computed one after another. These multiply
    most rows by their gates and ups again, in caches that hold the rows anyway.
    """

    def __init__(self, layer: DecoderLayer, offloader: Offloader | None, *, weights_stay: bool) -> None:
        super().__init__(layer, offloader, weights_stay=weights_stay)
        for module in self.modules():
            if isinstance(module, Norm | GatedNorm | Mixer | FeedForward | Experts):
                module.fuse = self.remaker.around(module.fuse)
            elif isinstance(module, Router):
                module.fuse = self.unless_by_turn(module.fuse)
        keep_gates_and_ups(self, KEPT_SHARE)
        if weights_stay and isinstance(layer.attention, GroupedQueryAttention):
            attention = layer.attention
            for projection in (attention.q, attention.k, attention.v, attention.output_gate):
                if projection is not None:
                    projection.fuse = self.unless_by_turn(projection.fuse)

    def unless_by_turn(self, fuse: Fuse) -> Fuse:
        """``fuse``, whose chains are made again unless the layer's experts are computed one after another."""
        again = self.remaker.around(fuse)
        experts = [module for module in self.modules() if isinstance(module, Experts)]

        def run(function: Callable[..., Any], *tensors: Tensor, **ways: Any) -> Any:
            by_turn = any(each.go_by_turn(tensors[0]) for each in experts)
            return (fuse if by_turn else again)(function, *tensors, **ways)

        return run


def keep_gates_and_ups(layer: DecoderLayer, share: float) -> None:
    """Sets the share of the rows whose gate and up products are kept, where experts are computed one after another."""
    for module in layer.modules():
        if isinstance(module, Experts):
            module.kept_share = share


def share_of_second_run(layer: DecoderLayer) -> float:
    """The share of the experts' gates and ups to keep where the feed-forward half is computed again: 0 or 1.

    With 0 the second run ends before the experts, which compute these products again in their own backward pass. Where
    the layer keeps something after its experts (a norm's input, dropout), the second run would compute the experts too,
    so with 1 they keep all.
    """
    ends = not layer.norms_outputs and layer.feed_forward_post_norm is None and not layer.residual_dropout
    return 0.0 if ends else 1.0
