"""Runs a forward pass and records attention's inputs and outputs, routers' choices and the residual stream.

The model computes as it always does. Torch's hooks read modules' outputs. Queries and keys are read at
``Attention.core``, a seam that docs/decisions/seams.md names: a wrapper records them and calls the core.

Shape letters: B batch, S sequence, D d_model, H heads, G key-value heads, C d_head, V vocab_size.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from launcher.prove.compare.routing import routers_of
from modeling.attention import Attention, AttentionCore
from modeling.context import Context
from modeling.decoder import Decoder
from modeling.router import Routing
from modeling.score_terms import ScoreTerms


@dataclass
class Called:
    """One call of a layer's attention: the inputs of its core, and the input and output of the module."""

    core: AttentionCore
    q_BSHC: Tensor
    k_BSGC: Tensor
    v_BSGC: Tensor
    window: int | None
    terms: ScoreTerms
    hidden_BSD: Tensor | None = None
    out_BSD: Tensor | None = None


@dataclass
class Seen:
    """What was recorded of one forward pass."""

    context: Context
    called: dict[int, Called] = field(default_factory=dict)  # layer -> its attention's call, where asked for
    routing: dict[int, Routing] = field(default_factory=dict)  # layer -> its router's result
    residuals: list[Tensor] = field(default_factory=list)  # (B, S, D): entering the first layer, then after each
    logits_BSV: Tensor | None = None


@torch.no_grad()
def see(model: Decoder, tokens_BS: Tensor, context: Context, attention_layers: Sequence[int] = ()) -> Seen:
    """Runs the model once and returns what was recorded, with attention's inputs and outputs in ``attention_layers``.

    Afterwards the model is as it was: hooks are removed, and the attention cores are put back.
    """
    seen = Seen(context)
    with watching(model, seen, attention_layers):
        seen.logits_BSV = model(tokens_BS, context).logits_BSV
    return seen


@contextlib.contextmanager
def watching(model: Decoder, seen: Seen, attention_layers: Sequence[int]) -> Iterator[None]:
    """Records the model's forward passes into ``seen`` while the context lasts."""
    layers = model.own_layers

    def enter(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen.residuals.append(arguments[0])

    def leave(_: nn.Module, __: object, result: tuple[Tensor, object]) -> None:
        seen.residuals.append(result[0])

    with contextlib.ExitStack() as stack:
        handles = [layers[0].register_forward_pre_hook(enter)]
        handles += [layer.register_forward_hook(leave) for layer in layers]
        for number, router in routers_of(model).items():
            handles.append(router.register_forward_hook(_keeping(seen.routing, number)))
        for handle in handles:
            stack.callback(handle.remove)
        for number in attention_layers:
            stack.enter_context(watching_core(attention_of(model, number), number, seen))
        yield


def attention_of(model: Decoder, layer: int) -> Attention:
    """The attention module of a layer, which must not be one of linear attention."""
    attention = model.layer_of(str(layer)).attention
    assert isinstance(attention, Attention), layer
    return attention


def _keeping(into: dict[int, Routing], layer: int) -> Any:
    def keep(_: nn.Module, __: object, routing: Routing) -> None:
        into[layer] = routing

    return keep


@contextlib.contextmanager
def watching_core(attention: Attention, layer: int, seen: Seen) -> Iterator[None]:
    """Records the inputs of the layer's core, and the module's input and output, into ``seen`` while it lasts."""
    core = attention.core

    def watched(q: Tensor, k: Tensor, v: Tensor, context: Context, window: int | None, terms: ScoreTerms) -> Tensor:
        seen.called[layer] = Called(core, q, k, v, window, terms)
        return core(q, k, v, context, window, terms)

    def keep(_: nn.Module, given: tuple[Any, ...], out_BSD: Tensor) -> None:
        seen.called[layer].hidden_BSD, seen.called[layer].out_BSD = given[0], out_BSD

    handle = attention.register_forward_hook(keep)
    attention.core = watched
    try:
        yield
    finally:
        attention.core = core
        handle.remove()
