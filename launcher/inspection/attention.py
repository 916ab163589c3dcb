"""Attention weights as the layer's own core computes them, and a check that they reproduce the layer's output.

No kernel returns its weights. But its output is linear in the values: where key j's value is the j-th unit vector, the
output of a query is its weights. So the core itself is called, with the queries, keys, masks and terms of the pass, and
values of ones and zeros. No second formula of scores, caps, slopes, biases, sinks, windows or documents is needed.

Shape letters: B batch, S sequence, Q queries, D d_model, H heads, G key-value heads, C channels of a key.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.inspection.seen import Called
from modeling.attention import Attention
from modeling.context import Context

# Bounds of the largest difference between weights times values, through the output projection, and the module's own
# output, relative to its largest output. In fp32 both sum the same products in another order. In 16 bits the core's
# output and the projection's are rounded once each, on both sides: twice half a unit in the last place each.
FP32_TOLERANCE = 1e-5
ROUNDINGS = 4  # units in the last place (torch.finfo(dtype).eps), in 16 bits
SUM_TOLERANCE = 1e-5  # bound of how far a query's weights' sum is from one; they are fp32 in any dtype of the model


@dataclass
class LayerWeights:
    """The attention weights of one layer over one text, and the errors of the checks on them."""

    layer: int
    window: int | None
    heads: tuple[int, ...]
    weights_HSS: Tensor  # fp32 on the CPU, of ``heads``: from each query (rows) to each key
    sinks_HS: Tensor | None  # the part of each query's softmax that a sink takes; None: the layer has no sinks
    error: float  # of the output recomputed from the weights, relative to the module's largest output
    sum_error: float  # how far a query's weights, with its sink's, are from summing to one, at most
    unseen: float  # the largest weight of a key that the mask hides
    tolerance: float

    @property
    def is_right(self) -> bool:
        """Whether all errors are within their tolerances. NaN is not."""
        return self.error <= self.tolerance and self.sum_error <= SUM_TOLERANCE and self.unseen == 0


def tolerance_of(dtype: torch.dtype) -> float:
    """The tolerance of a module's output in this dtype, relative to its largest element."""
    return FP32_TOLERANCE if dtype == torch.float32 else ROUNDINGS * torch.finfo(dtype).eps


@torch.no_grad()
def weights_of(called: Called, context: Context) -> Tensor:
    """The weights (B, H, S, S) of all heads, fp32, computed by the core itself in S / C calls.

    Queries and keys are converted to fp32, which loses nothing: kernels compute scores in fp32 in any dtype.
    """
    q_BSHC, k_BSGC = called.q_BSHC.float(), called.k_BSGC.float()
    rows, seq_len, n_kv_heads, n_channels = k_BSGC.shape
    places_S = torch.arange(seq_len, device=k_BSGC.device)
    columns = []
    for start in range(0, seq_len, n_channels):
        units_SC = (places_S[:, None] == places_S[start : start + n_channels]).float()
        units_BSGC = units_SC[None, :, None].expand(rows, -1, n_kv_heads, -1).contiguous()
        columns.append(called.core(q_BSHC, k_BSGC, units_BSGC, context, called.window, called.terms))
    return torch.cat(columns, dim=-1).transpose(1, 2)


@torch.no_grad()
def output_of(attention: Attention, weights_BHSS: Tensor, called: Called) -> Tensor:
    """The module's output (B, S, D) recomputed from these weights and the values of the call."""
    v_BSGC = called.v_BSGC
    shared = weights_BHSS.shape[1] // v_BSGC.shape[2]
    v_BSHC = v_BSGC.float().repeat_interleave(shared, dim=2)
    out_BQHC = torch.einsum("bhqs,bshc->bqhc", weights_BHSS, v_BSHC).to(v_BSGC.dtype)
    assert called.hidden_BSD is not None
    return attention.put_out(out_BQHC, attention.positions.gather(called.hidden_BSD))


def layer_weights(attention: Attention, called: Called, context: Context, heads: tuple[int, ...]) -> LayerWeights:
    """The checked weights of a pass over one row. All heads are checked, and those of ``heads`` are kept."""
    weights_BHSS = weights_of(called, context)
    assert called.out_BSD is not None
    wanted_BSD = called.out_BSD.float()
    apart_BSD = (output_of(attention, weights_BHSS, called).float() - wanted_BSD).abs()
    largest = wanted_BSD.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    sums_BHS = weights_BHSS.sum(-1)
    sinks_BHS = None
    if called.terms.sinks_H is not None:
        sinks_BHS = (1 - sums_BHS).clamp(min=0)
        excess_BHS = (sums_BHS - 1).clamp(min=0)
    else:
        excess_BHS = (sums_BHS - 1).abs()
    seen_BSS = context.mask_BSS(called.window)
    unseen_BHSS = weights_BHSS.masked_fill(seen_BSS[:, None], 0).abs()
    return LayerWeights(
        layer=attention.layer,
        window=called.window,
        heads=heads,
        weights_HSS=weights_BHSS[0, list(heads)].cpu(),
        sinks_HS=None if sinks_BHS is None else sinks_BHS[0, list(heads)].cpu(),
        error=float(apart_BSD.max() / largest),
        sum_error=float(excess_BHS.max()),
        unseen=float(unseen_BHSS.max()),
        tolerance=tolerance_of(called.out_BSD.dtype),
    )


@dataclass
class HeadHabits:
    """Where a head looks, as means over all queries but the first, which sees only itself."""

    head: int
    first: float  # the weight on the text's first token
    previous: float  # the weight on the token before the query
    itself: float  # the weight on the query's own token
    distance: float  # the distance to keys in tokens, weighted
    sink: float | None  # the part that the sink takes; None: no sinks


def habits_of(weights: LayerWeights) -> list[HeadHabits]:
    """The habits of each kept head. In a text of one token they are those of that token."""
    found = []
    for place, head in enumerate(weights.heads):
        weights_SS = weights.weights_HSS[place].double()
        n_tokens = len(weights_SS)
        skipped = 1 if n_tokens > 1 else 0
        rows_QS = weights_SS[skipped:]
        places_S = torch.arange(n_tokens)
        distances_QS = (places_S[skipped:, None] - places_S).clamp(min=0)
        before = float(weights_SS[places_S[1:], places_S[:-1]].mean()) if n_tokens > 1 else 0.0
        found.append(
            HeadHabits(
                head=head,
                first=float(rows_QS[:, 0].mean()),
                previous=before,
                itself=float(weights_SS[places_S, places_S][skipped:].mean()),
                distance=float((rows_QS * distances_QS).sum(-1).mean()),
                sink=None if weights.sinks_HS is None else float(weights.sinks_HS[place, skipped:].mean()),
            )
        )
    return found
