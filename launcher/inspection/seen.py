"""A forward pass, and what is seen inside: attention's weights, routers' choices, the residual stream.

The model computes as it always does. Hooks of torch read what modules put out; queries and keys are read at
``Attention.core``, a seam that docs/decisions/seams.md names: what stands there is called, and its result returned.

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
    """One call of a layer's attention: what its core was given, and what the module was given and put out."""

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
    """What one forward pass did."""

    context: Context
    called: dict[int, Called] = field(default_factory=dict)  # layer -> its attention, where asked for
    routing: dict[int, Routing] = field(default_factory=dict)  # layer -> what its router gave
    residuals: list[Tensor] = field(default_factory=list)  # (B, S, D): entering the first layer, then after each
    logits_BSV: Tensor | None = None


@torch.no_grad()
def see(model: Decoder, tokens_BS: Tensor, context: Context, attention_layers: Sequence[int] = ()) -> Seen:
    """Runs the model once; of ``attention_layers`` attention's inputs and outputs are kept, too.

    The model is left as it was: hooks are taken off, and seams hold what they held.
    """
    seen = Seen(context)
    with watching(model, seen, attention_layers):
        seen.logits_BSV = model(tokens_BS, context).logits_BSV
    return seen


@contextlib.contextmanager
def watching(model: Decoder, seen: Seen, attention_layers: Sequence[int]) -> Iterator[None]:
    """Writes into ``seen`` what happens in the model as long as the block lasts."""
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
    """A layer's attention to keys."""
    attention = model.layer_of(str(layer)).attention
    assert isinstance(attention, Attention), layer
    return attention


def _keeping(into: dict[int, Routing], layer: int) -> Any:
    def keep(_: nn.Module, __: object, routing: Routing) -> None:
        into[layer] = routing

    return keep


@contextlib.contextmanager
def watching_core(attention: Attention, layer: int, seen: Seen) -> Iterator[None]:
    """Keeps what the layer's core is given, and what its module is given and puts out."""
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
