"""Overlaps tensor parallelism's reduce-scatter of gradients with the computation of the weights' gradients.

Megatron-LM (arXiv:2205.05198) does so in its LinearWithGradAccumulationAndAsyncCommunication. A block (attention, a
dense feed-forward layer, a shared expert) gathers hidden states and multiplies them by several weights. Once each
product has given its part of the gradient by the hidden states, that gradient is reduce-scattered over the ranks of
tp. The weights' gradients, which take as many products, are not needed for that. So a product's backward pass computes
the gradient by its inputs alone, and leaves its weight's gradient to an autograd node of that weight. Autograd runs
the nodes that are ready in the opposite order of their making, and they are made in this order:

1. the gather's beginning, whose backward pass waits for the reduce-scatter;
2. a node of each weight, whose backward pass computes its gradient;
3. the gather's end, whose backward pass begins the reduce-scatter;
4. the products.

The same products of the same numbers are computed in another order, so gradients are equal bit for bit. The hidden
states, and the gradients by the outputs of all products, are held in memory until the reduce-scatter has begun.

Shape letters: B batch, S sequence, D d_model, O what comes out of a product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from modeling.decoder import Decoder
from modeling.feed_forward import FeedForward
from modeling.kernels.products import Products
from modeling.linear import Linear
from modeling.mixer import Mixer
from parallel.collectives import SequenceGather, gather_sequence
from parallel.mesh import Axis
from parallel.tensor import SharedPositions


def overlap_sums(model: Decoder, axis: Axis) -> None:
    """Makes the blocks of a decoder overlap the reduce-scatter of input gradients with weights' gradients.

    ``model`` must be cut over tp already (``apply_tensor_parallelism``), and its layers must have their ``products``.
    Changes no value. Weights must stay in memory from the forward to the backward pass (not ZeRO 3), and one backward
    pass must compute all gradients (not the pipeline schedules that compute weights' gradients later).
    """
    for block in model.modules():
        if isinstance(block, Mixer | FeedForward):
            readers = [layer for layer in block.modules() if isinstance(layer, Linear) and reads_hidden_states(layer)]
            block.positions = positions = OverlappedPositions(axis, readers)
            for reader in readers:
                reader.products = LateProducts(reader.products, positions)


def reads_hidden_states(layer: Linear) -> bool:
    """Whether the layer multiplies its block's gathered hidden states: its weight's input dim is d_model."""
    return layer.stated["weight"].dims[1] == "d_model"


class Left:
    """What a product's backward pass leaves for its weight's node: the gradient by its outputs, and its inputs."""

    def __init__(self, products: Products) -> None:
        self.products = products
        self.held: tuple[Tensor, Tensor] | None = None

    def put(self, grad: Tensor, inputs: Tensor) -> None:
        """Stores the two tensors from which the weight's gradient will be computed."""
        assert self.held is None, "a product is differentiated twice before its weight is"
        self.held = grad, inputs

    def take(self) -> tuple[Tensor, Tensor]:
        """Returns what ``put`` stored, and drops its own reference to it."""
        assert self.held is not None, "a weight is differentiated before its product is"
        held, self.held = self.held, None
        return held


Late = tuple[tuple[Tensor, ...], Left]  # the outputs of a weight's node: the weight, and its bias if there is one


class OverlappedPositions(SharedPositions):
    """The ``SharedPositions`` of one block, whose gather leaves a node for the weight of each of ``readers``.

    ``readers`` are the layers that multiply the gathered hidden states, each once in a forward pass.
    """

    def __init__(self, axis: Axis, readers: Sequence[Linear]) -> None:
        super().__init__(axis)
        self.readers = readers
        self.late: dict[nn.Parameter, Late] = {}  # by weight, the nodes that its reader has not used yet

    def gather(self, hidden_BSD: Tensor) -> Tensor:
        """From this rank's part of the positions (B, S/n, D) to all of them (B, S, D). All ranks of tp call it."""
        self.late = {}
        if not (torch.is_grad_enabled() and hidden_BSD.requires_grad):
            return gather_sequence(hidden_BSD, self.axis)
        gather = SequenceGather(self.axis)
        whole_BSD = gather.begin(hidden_BSD)
        for reader in self.readers:
            left = Left(reader.products)
            weights = (reader.weight,) if reader.bias is None else (reader.weight, reader.bias)
            self.late[reader.weight] = _LateWeights.apply(left, *weights), left
        return gather.end(whole_BSD)


class LateProducts:
    """``products`` whose weights' gradients are computed by the nodes that ``positions`` has made for them.

    A product for which no node is left computes its weight's gradient in its own backward pass. The products of a
    second run under recomputation are of this kind, but they are never differentiated: that run only makes the saved
    tensors again, and those are the same in both kinds.
    """

    def __init__(self, products: Products, positions: OverlappedPositions) -> None:
        self.products, self.positions = products, positions

    def linear(self, inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``inputs @ weight.T + bias``, whose weight's gradient is left to the weight's node, if there is one."""
        if not torch.is_grad_enabled():
            return self.products.linear(inputs, weight_OI, bias_O)
        weights, left = (weight_OI,) if bias_O is None else (weight_OI, bias_O), None
        if isinstance(weight_OI, nn.Parameter) and weight_OI in self.positions.late:
            weights, left = self.positions.late.pop(weight_OI)
        return _Product.apply(self.products, left, inputs, *weights)

    def linear_grad(self, grad: Tensor, weight_OI: Tensor) -> Tensor:
        """``linear``'s gradient by its inputs, from that by its outputs, by ``products``."""
        return self.products.linear_grad(grad, weight_OI)

    def weight_grad(self, grad_RO: Tensor, rows_RI: Tensor) -> Tensor:
        """``linear``'s gradient by its weight, from that by its outputs and from its inputs, by ``products``."""
        return self.products.weight_grad(grad_RO, rows_RI)

    def grouped(self, rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor) -> Tensor:
        """Each row times its expert's matrix, by ``products``; expert e's rows end before ``ends_E[e]``."""
        return self.products.grouped(rows_RI, ends_E, weight_EOI)

    def weights_changed(self) -> None:
        """Tells ``products`` that weights have new values."""
        self.products.weights_changed()

    def kept(self) -> list[Tensor]:
        """The tensors that ``products`` keeps of weights between two calls of ``weights_changed``."""
        return self.products.kept()


def weights_grads(products: Products, grad: Tensor, inputs: Tensor, n_weights: int) -> tuple[Tensor, ...]:
    """The gradients of a product by its weight (O, D) and, where ``n_weights`` is 2, its bias (O)."""
    grad_RO = grad.flatten(0, -2)
    return products.weight_grad(grad_RO, inputs.flatten(0, -2)), *([grad_RO.sum(0)] if n_weights == 2 else [])


class _LateWeights(Function):
    """(left, weight_OI, perhaps bias_O) -> views of the weights. Their gradients are computed from ``left``.

    ``left`` is filled by the product's backward pass, which runs first.
    """

    @staticmethod
    def forward(ctx: Any, left: Left, *weights: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.left, ctx.n_weights = left, len(weights)
        ctx.set_materialize_grads(False)
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad, inputs = ctx.left.take()
        return None, *weights_grads(ctx.left.products, grad, inputs, ctx.n_weights)


class _Product(Function):
    """(products, left, inputs, weight_OI, perhaps bias_O) -> outputs."""

    @staticmethod
    def forward(ctx: Any, products: Products, left: Left | None, inputs: Tensor, *weights: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(inputs, weights[0])
        ctx.products, ctx.left, ctx.n_weights = products, left, len(weights)
        return products.linear(inputs, weights[0], weights[1] if len(weights) == 2 else None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, weight_OI = ctx.saved_tensors
        grad_inputs = ctx.products.linear_grad(grad, weight_OI) if ctx.needs_input_grad[2] else None
        if ctx.left is None:
            return None, None, grad_inputs, *weights_grads(ctx.products, grad, inputs, ctx.n_weights)
        ctx.left.put(grad, inputs)
        return None, None, grad_inputs, *([None] * ctx.n_weights)
