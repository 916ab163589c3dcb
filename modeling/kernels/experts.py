"""The experts' SwiGLU over tokens sorted by expert, as grouped matrix products.

Shape letters: T tokens, K top_k, R rows (token-expert pairs, padded), E experts, D d_model, F d_ff.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from modeling.kernels.expert_turns import Rows, experts_by_turn, sum_of_rows, weights_to_rows
from modeling.kernels.fuse import Fuse, never_compiled, plainly
from modeling.kernels.products import AS_THEY_ARE, Products
from modeling.kernels.row_counts import rounded_up
from modeling.kernels.scratch import is_real

# Rows are rounded up to a power of two that fits between ROW_UNITS and 2 * ROW_UNITS times into an expert's mean rows;
# row_counts.py says why. In fp32 torch uses MKL, which builds nothing for a number of rows.
LEAST_ROW_MULTIPLE = 16
ROW_UNITS = 16
ONES = 8  # grouped_mm requires rows of whole units of 16 bytes, in 16 bits
GATE_SLOPE = 1.702  # of gpt-oss's gates


class ExpertBiases(NamedTuple):
    """The biases that are added to the experts' three matrix products."""

    gate_EF: Tensor
    up_EF: Tensor
    down_ED: Tensor


class Ways(NamedTuple):
    """How experts are computed, without changing what is computed (but for rounding)."""

    fuse: Fuse = plainly
    products: Products = AS_THEY_ARE  # biases are added in the rows' own dtype
    # the share of rows whose gate and up projections are kept for backward, where experts are computed one by one
    kept_share: float = 1.0


PLAINLY = Ways()


def experts_grouped(
    hidden_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    biases: ExpertBiases | None = None,
    swiglu_limit: float | None = None,
    ways: Ways = PLAINLY,
    row_multiple: int | None = None,
    counts_E: Tensor | None = None,
) -> Tensor:
    """Each token's weighted sum of its experts' SwiGLUs (T, D), by grouped matrix products over all experts.

    Deterministic in both passes. ``swiglu_limit`` selects gpt-oss's clamped SwiGLU (``gated``). Each expert's rows are
    rounded up to ``row_multiple`` (None: what is fast on the device in that dtype). ``counts_E`` is each expert's
    number of pairs, where the caller knows it.

    The down projection is linear, so the weights may multiply before or after it: where experts are computed one after
    another on a CPU, in the sum of a token's rows; elsewhere, the projection's input, which is narrower than its
    output.
    """
    if counts_E is None:
        counts_E = count_pairs(indices_TK, gate_EFD.shape[0])
    rows = place_rows(
        indices_TK, counts_E, row_multiple or row_multiple_of(hidden_TD, indices_TK.numel() // len(counts_E))
    )
    return experts_over_rows(hidden_TD, rows, weights_TK, gate_EFD, up_EFD, down_EDF, biases, swiglu_limit, ways)


def row_multiple_of(rows_RD: Tensor, mean_rows: int) -> int:
    """The default unit to which each expert's rows are rounded up: what is fast on their device in their dtype.

    ``mean_rows`` is the rows of an expert if all have as many; about 2 to 3% of rows are then padding.
    """
    return narrow_row_multiple(mean_rows) if rows_RD.is_cpu and rows_RD.dtype.itemsize == 2 else 1


def narrow_row_multiple(mean_rows: int) -> int:
    """The default unit for rows of 16 bits on a CPU."""
    return max(LEAST_ROW_MULTIPLE, 1 << (mean_rows // ROW_UNITS).bit_length() >> 1)


def experts_over_rows(
    hidden_TD: Tensor,
    rows: Rows,
    weights_TK: Tensor | None,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    biases: ExpertBiases | None = None,
    swiglu_limit: float | None = None,
    ways: Ways = PLAINLY,
) -> Tensor:
    """``experts_grouped`` for pairs whose rows are already placed.

    ``weights_TK`` None means that each token has one expert, with a weight of one.
    """
    fuse, products, kept_share = ways
    if go_by_turn(hidden_TD, gate_EFD, products, is_plain=biases is None and swiglu_limit is None):
        weights = hidden_TD.new_ones(rows.rows_TK.shape) if weights_TK is None else weights_TK.to(hidden_TD.dtype)
        if weights_TK is None:  # the rows' outputs are kept for the weights' gradients, wherever the weights are
            kept_share = kept_share or 1.0
        return experts_by_turn(hidden_TD, weights, gate_EFD, up_EFD, down_EDF, rows, kept_share)
    # Rows that came from other ranks are as large as the tensor they are made from: recomputing them saves nothing.
    pick = plainly if weights_TK is None else fuse
    rows_RD, same_RD = pick(to_rows_twice, hidden_TD, rows.rows_TK, rows.tokens_R, sum_by=fuse)
    gate_EF, up_EF, down_ED = biases or (None, None, None)
    gate_RF = grouped_linear(rows_RD, rows.ends_E, gate_EFD, gate_EF, products)
    up_RF = grouped_linear(same_RD, rows.ends_E, up_EFD, up_EF, products)
    if weights_TK is None:
        inner_RF = fuse(gated, gate_RF, up_RF, swiglu_limit=swiglu_limit, rows_vary=True)
        return FromRows.apply(grouped_linear(inner_RF, rows.ends_E, down_EDF, down_ED, products), rows)
    weights_R1 = WeightsToRows.apply(weights_TK.to(hidden_TD.dtype), rows)
    inner_RF = fuse(weighted, gate_RF, up_RF, weights_R1, swiglu_limit=swiglu_limit, rows_vary=True)
    result_RD = grouped_linear(inner_RF, rows.ends_E, down_EDF, down_ED, products, weights_R1)
    return SumRows.apply(result_RD, rows, fuse)


def go_by_turn(hidden: Tensor, gate_EFD: Tensor, products: Products, *, is_plain: bool) -> bool:
    """Whether experts are computed one after another over rows like ``hidden``, as on a CPU, or by grouped products.

    ``is_plain``: they have no biases, and their SwiGLU is not clamped.
    """
    return hidden.is_cpu and is_plain and products is AS_THEY_ARE and hidden.dtype == gate_EFD.dtype


def gated(gate: Tensor, up: Tensor, swiglu_limit: float | None) -> Tensor:
    """SwiGLU's inner value, silu(gate) * up; with a limit (up + 1) * gate * sigmoid(GATE_SLOPE * gate), both clamped.

    The latter is gpt-oss's (arXiv:2508.10925, section 2.3): the gate is at most the limit, and up between minus and
    plus the limit.
    """
    if swiglu_limit is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return (up + 1) * (gate * torch.sigmoid(GATE_SLOPE * gate))


def weighted(gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor, *, swiglu_limit: float | None) -> Tensor:
    """SwiGLU's inner value (``gated``), each row times its weight."""
    return gated(gate_RF, up_RF, swiglu_limit) * weights_R1


def gathered_sum(rows_RD: Tensor, rows_TK: Tensor) -> Tensor:
    """Each token's sum of its K rows (T, D)."""
    if rows_TK.shape[1] == 1:
        return rows_RD.index_select(0, rows_TK[:, 0])
    return rows_RD.index_select(0, rows_TK.flatten()).view(*rows_TK.shape, rows_RD.shape[1]).sum(1)


def sum_by_place(rows_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Each token's sum of its K rows (T, D), times their weights, in fp32: the first rows, then the second, and so on.

    To a compiler that is elementwise work. A sum over K rows is a reduction, whose kernel reached a quarter of an
    H200's copy bandwidth (torch 2.11: 8,192 tokens, two times 8 rows of 2,048, 0.56 ms).
    """
    total_TD: Tensor | None = None
    for place in range(rows_TK.shape[1]):
        added_TD = rows_RD.index_select(0, rows_TK[:, place]).float()
        if weights_TK is not None:
            added_TD = added_TD * weights_TK[:, place, None]
        total_TD = added_TD if total_TD is None else total_TD + added_TD
    assert total_TD is not None, "each token has an expert"
    return total_TD


def compiled_gathered_sum(rows_RD: Tensor, rows_TK: Tensor) -> Tensor:
    """``gathered_sum`` in a form that compiles well."""
    return sum_by_place(rows_RD, rows_TK).to(rows_RD.dtype)


def compiled_sum_of_two(rows_RD: Tensor, others_RD: Tensor, rows_TK: Tensor) -> Tensor:
    """Each token's sum of its K rows of both tensors (T, D), in a form that compiles well."""
    return (sum_by_place(rows_RD, rows_TK) + sum_by_place(others_RD, rows_TK)).to(rows_RD.dtype)


def gathered_weighted_sum(rows_RD: Tensor, weights_TK: Tensor, rows_TK: Tensor) -> Tensor:
    """Each token's sum of its K rows, each times its weight (T, D)."""
    rows_TKD = rows_RD.index_select(0, rows_TK.flatten()).view(*rows_TK.shape, rows_RD.shape[1])
    return (rows_TKD * weights_TK[..., None]).sum(1)


def compiled_weighted_sum(rows_RD: Tensor, weights_TK: Tensor, rows_TK: Tensor) -> Tensor:
    """``gathered_weighted_sum`` in a form that compiles well."""
    return sum_by_place(rows_RD, rows_TK, weights_TK).to(rows_RD.dtype)


def weighted_sum_gradients(
    grad_TD: Tensor, rows_RD: Tensor, weights_R1: Tensor, tokens_R: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of ``gathered_weighted_sum`` by the rows (R, D), and by the weight of each row (R,)."""
    grad_RD = grad_TD.index_select(0, tokens_R)
    return grad_RD * weights_R1, (grad_RD * rows_RD).sum(1)


def summed(rows_RD: Tensor, rows_TK: Tensor, fuse: Fuse) -> Tensor:
    """Each token's sum of its K rows (T, D), in the way that is fastest on the device."""
    if rows_RD.is_cpu:
        return sum_of_rows(rows_RD, rows_TK)
    return fuse(gathered_sum if fuse is plainly else compiled_gathered_sum, rows_RD, rows_TK, rows_vary=True)


def grouped_linear(
    rows_RI: Tensor,
    ends_E: Tensor,
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    products: Products = AS_THEY_ARE,
    factors_R1: Tensor | None = None,
) -> Tensor:
    """Each row times its expert's matrix (R, O), plus its bias. Expert e's rows end before ``ends_E[e]``.

    A bias is added by one more matrix product, with ones, so that its gradient is summed like the matrices', in a fixed
    order. ``factors_R1`` multiply each row's bias.
    """
    out_RO = products.grouped(rows_RI, ends_E, weight_EOI)
    if bias_EO is None:
        return out_RO
    ones_RI = rows_RI.new_ones(rows_RI.shape[0], ONES)
    ones_RI = ones_RI if factors_R1 is None else ones_RI * factors_R1
    return out_RO + F.grouped_mm(ones_RI, F.pad(bias_EO[:, None], (0, 0, 0, ONES - 1)), offs=ends_E)


def count_pairs(indices_TK: Tensor, n_experts: int) -> Tensor:
    """The number of token-expert pairs of each expert (E,), int64.

    Unlike torch.bincount, whose output's size depends on the values, it does not make the host wait for the GPU.
    """
    experts_P = indices_TK.flatten().long()
    return experts_P.new_zeros(n_experts).scatter_add_(0, experts_P, torch.ones_like(experts_P))


def place_rows(indices_TK: Tensor, counts_E: Tensor, row_multiple: int) -> Rows:
    """The rows of the token-expert pairs. Each expert's are rounded up to ``row_multiple`` or coarser (row_counts)."""
    order_P = order_by_expert(indices_TK.flatten(), len(counts_E))
    return rows_in_order(order_P, indices_TK.shape[1], counts_E, row_multiple)


def order_by_expert(experts_P: Tensor, n_experts: int) -> Tensor:
    """The numbers of the pairs in the order of their experts, each expert's in ascending order; int64.

    On a CPU numpy counts, where torch compares: 0.3 ms instead of 1.9 for 49152 pairs (one thread, Intel Xeon with
    AMX, 2026-11-29).
    """
    if experts_P.is_cpu and is_real(experts_P) and n_experts <= 1 << 16:
        return torch.from_numpy(np.argsort(experts_P.numpy().astype(np.uint16), kind="stable"))
    return narrow(experts_P, n_experts).argsort(stable=True)


def narrow(experts_P: Tensor, n_experts: int) -> Tensor:
    """The same expert numbers in fewer bytes, since a GPU's sort takes two more launches for each byte."""
    return experts_P if experts_P.is_cpu else experts_P.to(narrow_dtype(n_experts))


def narrow_dtype(n_experts: int) -> torch.dtype:
    """A dtype that holds the experts' numbers, and that torch can sort."""
    return torch.uint8 if n_experts <= 2**8 else torch.int32


def place_blocks(counts_NE: Tensor, n_rows: int, row_multiple: int) -> Rows:
    """The rows of ``n_rows`` tokens that come from N sources, one after another, each source's sorted by expert.

    Each token has one expert. ``counts_NE`` are each source's tokens for each expert; the rows follow from these
    numbers, so nothing is sorted.
    """
    counts_EN = counts_NE.t().contiguous()
    came_EN = (counts_NE.flatten().cumsum(0) - counts_NE.flatten()).view_as(counts_NE).t()  # each block's first token
    sorted_EN = (counts_EN.flatten().cumsum(0) - counts_EN.flatten()).view_as(counts_EN)  # and its first row
    shifts_P = (came_EN - sorted_EN).flatten().repeat_interleave(counts_EN.flatten(), output_size=n_rows)
    order_P = shifts_P.add_(torch.arange(n_rows, device=counts_NE.device))
    return rows_in_order(order_P, 1, counts_EN.sum(1), row_multiple)


def rows_in_order(order_P: Tensor, top_k: int, counts_E: Tensor, row_multiple: int) -> Rows:
    """The rows of the pairs of ``top_k`` experts a token, where ``order_P`` sorts the pairs by their experts."""
    sorted_rows_P = torch.arange(order_P.numel(), device=order_P.device)
    tokens_R = tokens_P = order_P // top_k if top_k > 1 else order_P
    ends_E = counts_E.cumsum(0)
    if row_multiple > 1:
        first_E = ends_E - counts_E
        padded_E = rounded_up(counts_E, row_multiple)
        ends_E = padded_E.cumsum(0)
        sorted_rows_P = sorted_rows_P + (ends_E - padded_E - first_E).repeat_interleave(counts_E)
        tokens_R = tokens_P[first_E.repeat_interleave(padded_E)].index_copy_(0, sorted_rows_P, tokens_P)
    rows_P = torch.empty_like(order_P).index_copy_(0, order_P, sorted_rows_P)
    return Rows(rows_P.view(-1, top_k), tokens_R, ends_E.to(torch.int32), row_multiple)


class ToRows(Function):
    """hidden_TD -> rows_RD: copies each token to its K rows. Backward sums the gradients of the K rows.

    What is computed from rows of padding is not used, so their gradient is zero.
    """

    @staticmethod
    def forward(ctx, hidden_TD: Tensor, rows: Rows, fuse: Fuse) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows.rows_TK)
        ctx.fuse = fuse
        return hidden_TD.index_select(0, rows.tokens_R)  # one pass: K of index_copy_ take 3 to 5 times as long

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (rows_TK,) = ctx.saved_tensors
        return summed(grad_RD, rows_TK, ctx.fuse), None, None


class ToRowsTwice(Function):
    """hidden_TD -> the same rows_RD twice, for two products. Backward sums the K rows of both gradients.

    Compiled, both are read once; autograd itself would write their sum, row by row, and read it again.
    """

    @staticmethod
    def forward(ctx, hidden_TD: Tensor, rows_TK: Tensor, tokens_R: Tensor, fuse: Fuse) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.save_for_backward(rows_TK)
        ctx.fuse = fuse
        rows_RD = hidden_TD.index_select(0, tokens_R)
        return rows_RD, rows_RD.view_as(rows_RD)

    @staticmethod
    def backward(ctx, grad_RD: Tensor, other_RD: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (rows_TK,) = ctx.saved_tensors
        if grad_RD.is_cpu or ctx.fuse is plainly:
            return sum_of_rows(grad_RD + other_RD, rows_TK), None, None, None
        return ctx.fuse(compiled_sum_of_two, grad_RD, other_RD, rows_TK, rows_vary=True), None, None, None


@never_compiled
def to_rows_twice(hidden_TD: Tensor, rows_TK: Tensor, tokens_R: Tensor, *, sum_by: Fuse) -> tuple[Tensor, Tensor]:
    """``ToRowsTwice`` as a function. Its gradients are summed by ``sum_by``."""
    return ToRowsTwice.apply(hidden_TD, rows_TK, tokens_R, sum_by)


class SumRows(Function):
    """rows_RD -> out_TD: each token's sum of its K rows. Backward copies each token's gradient to its K rows.

    The transpose of ``ToRows``. Rows of padding get a gradient too, which their weight of 0 has to cancel.
    """

    @staticmethod
    def forward(ctx, rows_RD: Tensor, rows: Rows, fuse: Fuse) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows.tokens_R)
        return summed(rows_RD, rows.rows_TK, fuse)

    @staticmethod
    def backward(ctx, grad_TD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (tokens_R,) = ctx.saved_tensors
        return grad_TD.index_select(0, tokens_R), None, None


class WeightedSumRows(Function):
    """(rows_RD, weights_TK) -> out_TD: each token's sum of its K rows, each times its weight, in one pass each way.

    For ranks whose weights are not where the experts are. Weights have the rows' dtype; there are no rows of padding.
    """

    @staticmethod
    def forward(ctx, rows_RD: Tensor, weights_TK: Tensor, rows: Rows, fuse: Fuse) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows_RD, weights_TK, rows.rows_TK, rows.tokens_R)
        ctx.fuse = fuse
        if rows_RD.is_cpu:
            return sum_of_rows(rows_RD, rows.rows_TK, weights_TK)
        weighted_sum = gathered_weighted_sum if fuse is plainly else compiled_weighted_sum
        return fuse(weighted_sum, rows_RD, weights_TK, rows.rows_TK, rows_vary=True)

    @staticmethod
    def backward(ctx, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        rows_RD, weights_TK, rows_TK, tokens_R = ctx.saved_tensors
        places_P = rows_TK.flatten()
        weights_R1 = torch.empty_like(weights_TK.flatten()).index_copy_(0, places_P, weights_TK.flatten())[:, None]
        given = (grad_TD, rows_RD, weights_R1, tokens_R)
        grad_RD, grad_weights_R = ctx.fuse(weighted_sum_gradients, *given, rows_vary=True)
        return grad_RD, grad_weights_R.index_select(0, places_P).view_as(weights_TK), None, None


class WeightsToRows(Function):
    """weights_TK -> weights_R1: each pair's weight in its row, 0 in rows of padding."""

    @staticmethod
    def forward(ctx, weights_TK: Tensor, rows: Rows) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows.rows_TK)
        return weights_to_rows(weights_TK, rows)

    @staticmethod
    def backward(ctx, grad_R1: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (rows_TK,) = ctx.saved_tensors
        return grad_R1[:, 0].index_select(0, rows_TK.flatten()).view_as(rows_TK), None


class FromRows(Function):
    """rows_RD -> result_TD: each token's only row. Backward copies its gradient back to that row.

    Rows of padding get a gradient of zero.
    """

    @staticmethod
    def forward(ctx, rows_RD: Tensor, rows: Rows) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows.rows_TK, rows.tokens_R)
        return rows_RD.index_select(0, rows.rows_TK[:, 0])

    @staticmethod
    def backward(ctx, grad_TD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        rows_T1, tokens_R = ctx.saved_tensors
        if len(tokens_R) == len(grad_TD):  # each row is taken
            return grad_TD.index_select(0, tokens_R), None
        zeros_RD = grad_TD.new_zeros(len(tokens_R), grad_TD.shape[-1])
        return zeros_RD.index_copy_(0, rows_T1[:, 0], grad_TD), None
