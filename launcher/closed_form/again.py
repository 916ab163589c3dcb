"""The cost of each mode of activation recomputation: the work that a layer repeats for one token, by closed forms."""

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
    """The properties of a layer that decide its cost and the memory of its activations."""

    is_moe: bool
    window: int | None
    is_linear: bool


class Again(NamedTuple):
    """The work that is recomputed for one token in one layer."""

    flops: float  # of matrix products
    elements: float  # read and written by elementwise operations

    @property
    def work(self) -> float:
        """FLOPs of the products, plus the elementwise work converted to FLOPs of the same time."""
        return self.flops + ELEMENT_FLOPS * self.elements


def kind_of(model: ModelConfig, layer: int) -> Kind:
    """The kind of a layer."""
    return Kind(model.is_moe_layer(layer), model.window_of(layer), model.is_linear_layer(layer))


@lru_cache(maxsize=256)
def again_of(
    model: ModelConfig, kind: Kind, mode: Recompute, seq_len: int, *, exchanges: bool, weights_stay: bool
) -> Again:
    """The work that ``mode`` recomputes for one token in a layer of this kind.

    ``exchanges``: experts' rows come from other ranks (ep > 1). ``weights_stay``: weights stay in memory between
    passes, as they do except under ZeRO 3.
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
    """FLOPs of one token's scores and weighted values in a forward pass, with the mean number of keys of a query."""
    near = min(window or seq_len, seq_len)
    keys = near - near**2 / (2 * seq_len)
    return 2.0 * keys * model.n_heads * (model.qk_head_dim + model.v_head_dim)


def linear_flops(model: ModelConfig) -> float:
    """FLOPs of one token in the rule of linear attention, in a forward pass."""
    assert model.linear_attention is not None
    return linear.rule_flops(model.linear_attention)


def is_last(model: ModelConfig, tensor: LogicalTensor, *, is_moe: bool) -> bool:
    """Whether recomputation stops before this matrix, because no backward pass needs the output of its product.

    Experts' last products are recomputed, since their rows are sorted back among others.
    """
    is_gated = is_moe and model.moe is not None and model.moe.shared_gate
    if model.norm_placement != "pre" or model.residual_dropout or is_gated:
        return False
    return tensor.weight.dims == ("d_model", "shared_d_ff" if is_moe else "d_ff")


def attention_elements(model: ModelConfig, *, is_linear: bool) -> float:
    """Elements that one token reads and writes in attention's norms, rotary embedding and output gates."""
    if is_linear and model.linear_attention is not None:
        return 2.0 * model.d_model + linear.elements(model.linear_attention)
    turned = 2.0 * (model.n_heads + model.n_kv_heads) * model.qk_head_dim
    gated = model.n_gates + 2.0 * model.n_heads * model.v_head_dim if model.n_gates else 0.0
    return 2.0 * model.d_model + turned + gated


def feed_forward_elements(model: ModelConfig, *, is_moe: bool) -> float:
    """Elements that one token reads and writes in the norm and the activation of a feed-forward block."""
    norm = 2.0 * model.d_model
    if not is_moe or model.moe is None:
        return norm + (3.0 if model.ff_gated else 2.0) * model.d_ff
    moe = model.moe
    return norm + 3.0 * (moe.top_k * moe.d_ff + moe.shared_width)


def row_elements(model: ModelConfig, *, is_moe: bool) -> float:
    """Elements that one token reads and writes when it is sorted to its experts and back; 0 in a dense layer."""
    return 4.0 * model.moe.top_k * model.d_model if is_moe and model.moe is not None else 0.0
