"""What a layer's modes of recomputation cost: what a backward pass computes again of one token, by closed forms."""

from functools import lru_cache
from typing import NamedTuple

from launcher.closed_form import linear
from modeling.config import ModelConfig
from modeling.counts import active_elements
from modeling.logical import LogicalTensor, logical_tensors
from parallel.recompute import Recompute

# FLOPs of a product that a GPU does while it reads or writes one element of 16 bits (H100: 990 TFLOP/s, 3.35 TB/s).
ELEMENT_FLOPS = 600


class Kind(NamedTuple):
    """What a layer is: layers of one kind cost alike, and leave as much."""

    is_moe: bool
    window: int | None
    is_linear: bool


class Again(NamedTuple):
    """What is computed again of one token in one layer."""

    flops: float  # of products
    elements: float  # that chains of elementwise work read and write

    @property
    def work(self) -> float:
        """FLOPs of the products, with the elementwise work counted in FLOPs, too."""
        return self.flops + ELEMENT_FLOPS * self.elements


def kind_of(model: ModelConfig, layer: int) -> Kind:
    """The kind of a layer."""
    return Kind(model.is_moe_layer(layer), model.window_of(layer), model.is_linear_layer(layer))


@lru_cache(maxsize=256)
def again_of(
    model: ModelConfig, kind: Kind, mode: Recompute, seq_len: int, *, exchanges: bool, weights_stay: bool
) -> Again:
    """What a mode computes again in a layer of this kind.

    ``exchanges``: experts' rows come from other ranks. ``weights_stay``: as not under ZeRO 3.
    """
    is_moe, window, is_linear = kind
    layer = next(each for each in model.all_layers if kind_of(model, each) == kind)
    tensors = [each for each in logical_tensors(model).values() if each.layer == layer and each.weight.is_matrix]
    attended, fed = attention_elements(model, is_linear=is_linear), feed_forward_elements(model, is_moe=is_moe)
    rows = row_elements(model, is_moe=is_moe)
    halves = {
        half: 2.0 * sum(active_elements(model, each) for each in tensors if each.half == half)
        for half in ("attention", "feed_forward")
    }
    halves["attention"] += linear_flops(model) if is_linear else core_flops(model, seq_len, window)
    halves["feed_forward"] -= 2.0 * sum(each.numel for each in tensors if is_last(model, each, is_moe=is_moe))
    match mode:
        case "none":
            return Again(0.0, 0.0)
        case "selective":
            products = {("scores", "d_model")}
            if weights_stay and model.mla is None:
                products |= {("heads", "d_model"), ("kv_heads", "d_model"), ("per_head", "d_model")}
            again = sum(each.numel for each in tensors if each.weight.dims in products)
            return Again(2.0 * again, attended + fed + (0.0 if exchanges else rows / 2))
        case "feed_forward":
            return Again(halves["feed_forward"], 2.0 * model.d_model + fed + rows)
        case "full":
            return Again(sum(halves.values()), attended + fed + rows)


def core_flops(model: ModelConfig, seq_len: int, window: int | None) -> float:
    """Of queries times keys and probabilities times values, forward: of the keys that a query meets on the mean."""
    near = min(window or seq_len, seq_len)
    keys = near - near**2 / (2 * seq_len)
    return 2.0 * keys * model.n_heads * (model.qk_head_dim + model.v_head_dim)


def linear_flops(model: ModelConfig) -> float:
    """Of linear attention's rule, forward."""
    assert model.linear_attention is not None
    return linear.rule_flops(model.linear_attention)


def is_last(model: ModelConfig, tensor: LogicalTensor, *, is_moe: bool) -> bool:
    """Whether computing again stops before the matrix: nothing that its product puts out is kept for a backward pass.

    Experts' products are computed: what comes back of their rows is put among others.
    """
    is_gated = is_moe and model.moe is not None and model.moe.shared_gate
    if model.norm_placement != "pre" or model.residual_dropout or is_gated:
        return False
    return tensor.weight.dims == ("d_model", "shared_d_ff" if is_moe else "d_ff")


def attention_elements(model: ModelConfig, *, is_linear: bool) -> float:
    """Read and written by the norm, by what turns and norms queries and keys, and by the gates of what comes out."""
    if is_linear and model.linear_attention is not None:
        return 2.0 * model.d_model + linear.elements(model.linear_attention)
    turned = 2.0 * (model.n_heads + model.n_kv_heads) * model.qk_head_dim
    gated = model.n_gates + 2.0 * model.n_heads * model.v_head_dim if model.n_gates else 0.0
    return 2.0 * model.d_model + turned + gated


def feed_forward_elements(model: ModelConfig, *, is_moe: bool) -> float:
    """Read and written by the norm and by gates."""
    norm = 2.0 * model.d_model
    if not is_moe or model.moe is None:
        return norm + (3.0 if model.ff_gated else 2.0) * model.d_ff
    moe = model.moe
    return norm + 3.0 * (moe.top_k * moe.d_ff + moe.shared_width)


def row_elements(model: ModelConfig, *, is_moe: bool) -> float:
    """Read and written by what sorts tokens into their experts' rows and back; ``selective`` does the first alone."""
    return 4.0 * model.moe.top_k * model.d_model if is_moe and model.moe is not None else 0.0
