"""The parts of a step that tables list, and the rules that assign an operation to one of them.

A region is a stretch of the program: a module of the model, or a function of the step. Region and kind of an operation
together determine its part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

from launcher.trace.ops import Kind
from modeling.decoder import Decoder
from modeling.linear_attention import LinearAttention
from modeling.moe import MoE

Region = Literal[
    "data",
    "embedding",
    "norms",
    "attention",
    "linear_attention",
    "feed_forward",
    "router",
    "experts",
    "head",
    "further",
    "gradients",
    "optimizer",
    "bookkeeping",
    "pipeline",
    "other",
]
# Region -> the part of its matrix products, of attention's scores, and of everything else.
NAMES: dict[Region, tuple[str, str, str]] = {
    "data": ("data", "data", "data"),
    "embedding": ("embedding", "embedding", "embedding"),
    "norms": ("norms, residual sums", "norms, residual sums", "norms, residual sums"),
    "attention": ("attention: products", "attention: scores", "attention: RoPE, norms"),
    "linear_attention": ("linear attention: products", "linear attention: rule", "linear attention: rest"),
    "feed_forward": ("feed-forward: products", "feed-forward: products", "feed-forward: activation"),
    "router": ("router", "router", "router"),
    "experts": ("experts: products", "experts: products", "experts: dispatch, activation"),
    "head": ("head and loss", "head and loss", "head and loss"),
    "further": ("further tokens", "further tokens", "further tokens"),
    "gradients": ("gradients: sums", "gradients: sums", "gradients: sums"),
    "optimizer": ("optimizer", "optimizer", "optimizer"),
    "bookkeeping": ("batches, metrics", "batches, metrics", "batches, metrics"),
    "pipeline": ("pipeline: schedule", "pipeline: schedule", "pipeline: schedule"),
    "other": ("other", "other", "other"),
}
AXES = ("tp", "cp", "ep", "pp", "ZeRO", "metrics")
COPIES = "communication: host"  # activations copied to the host and back, as far as other work does not hide it
BUBBLE = "pipeline: bubble"
HOST = "waiting for the host"  # time in which the GPU has no work
PARTS = (
    *dict.fromkeys(name for names in NAMES.values() for name in names if name != "other"),
    *(f"communication: {axis}" for axis in AXES),
    COPIES,
    BUBBLE,
    HOST,
    "other",
)


@dataclass(frozen=True)
class Axes:
    """The properties of a layout that determine which axis a region's communication belongs to."""

    has_tp: bool = False
    gathers_weights: bool = False  # weights are gathered before each use, as under ZeRO 3


def part_of(region: Region, kind: Kind) -> str:
    """The part of an operation that sends nothing."""
    products, scores, others = NAMES[region]
    return {"product": products, "grouped product": products, "attention": scores}.get(kind, others)


def wire_part(region: Region, collective: str, axes: Axes) -> str:
    """The part of an operation that sends or receives."""
    return f"communication: {_axis(region, collective, axes)}"


def _axis(region: Region, collective: str, axes: Axes) -> str:
    """The axis that a collective belongs to, determined by its region and its kind."""
    gathers = collective in ("all-gather", "reduce-scatter", "broadcast")
    reduces = region in ("pipeline", "other") and collective != "send"
    if region in ("gradients", "optimizer") or reduces or (axes.gathers_weights and not axes.has_tp and gathers):
        return "ZeRO"
    if region in ("bookkeeping", "data"):
        return "pp" if collective == "send" else "metrics"
    if region == "experts" and collective == "all-to-all":
        return "ep"
    if region in ("attention", "linear_attention") and collective in ("all-to-all", "send"):
        return "cp"
    if collective == "send":
        return "pp"
    return "tp" if axes.has_tp else "cp"


def regions_of(model: Decoder) -> Iterator[tuple[nn.Module, Region]]:
    """The modules of a decoder, or of a part of one, with their regions; a module within another has its own region."""
    ends: tuple[tuple[nn.Module | None, Region], ...] = (
        (model, "embedding"),
        (model.embed, "embedding"),
        (model.embed_positions, "embedding"),
        (model.embed_norm, "embedding"),
        (model.final_norm, "norms"),
        (model.head, "head"),
    )
    for module, region in ends:
        if module is not None:
            yield module, region
    for name in model.layers:
        layer = model.layer_of(name)
        yield layer, "norms"
        yield layer.attention, "linear_attention" if isinstance(layer.attention, LinearAttention) else "attention"
        feed_forward = layer.feed_forward
        if isinstance(feed_forward, MoE):
            yield feed_forward, "router"
            yield feed_forward.sender, "experts"
            yield feed_forward.experts, "experts"
            if feed_forward.shared is not None:
                yield feed_forward.shared, "feed_forward"
        else:
            yield feed_forward, "feed_forward"
    for module in model.mtp.values():
        yield module, "further"
