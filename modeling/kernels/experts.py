"""The experts' SwiGLU over tokens sorted by expert, as grouped matrix products.

Shape letters: T tokens, K top_k, R rows (token-expert pairs, padded), E experts, D d_model, F d_ff.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from modeling.kernels.expert_turns import ExpertsByTurn, Rows, sum_of_rows, weights_to_rows
from modeling.kernels.fuse import Fuse, plainly

# oneDNN builds a primitive for each new row count in bf16 (2.2 ms against 0.3 ms; 2 cores with AMX, 2026-11-20), and
# the experts' counts change every step: on CPU each expert's rows are rounded up to this.
CPU_ROW_MULTIPLE = 64
ONES = 8  # grouped_mm wants rows of whole units of 16 bytes, in 16 bits
GATE_SLOPE = 1.702  # of gpt-oss's gates


class ExpertBiases(NamedTuple):
    """What is added to the experts' matrix products."""

    gate_EF: Tensor
    up_EF: Tensor
    down_ED: Tensor


def experts_grouped(
    hidden_TD: Tensor,
    indices_TK: Tensor,
    weights_TK: Tensor | None,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    biases: ExpertBiases | None = None,
    swiglu_limit: float | None = None,
    row_multiple: int | None = None,
    fuse: Fuse = plainly,
) -> Tensor:
    """Each token's weighted sum of its experts' SwiGLUs (T, D), by grouped matrix products over all experts.

    Deterministic in both directions. The down projections are linear, so where experts go one after another on a CPU
    the weights multiply in the sum of a token's rows, and elsewhere what goes into the projections, which is narrower
    than what comes out. ``weights_TK``: None means ones, of one expert a token. ``swiglu_limit``: as ``gated`` has it.
    Each expert's rows are rounded up to ``row_multiple`` (None: what is fast on the device).
    """
    counts_E = count_pairs(indices_TK, gate_EFD.shape[0])
    if row_multiple is None:
        row_multiple = 1 if hidden_TD.is_cuda else CPU_ROW_MULTIPLE
    rows = place_rows(indices_TK, counts_E, row_multiple)
    if hidden_TD.is_cpu and biases is None and swiglu_limit is None and hidden_TD.dtype == gate_EFD.dtype:
        weights = hidden_TD.new_ones(indices_TK.shape) if weights_TK is None else weights_TK.to(hidden_TD.dtype)
        return ExpertsByTurn.apply(hidden_TD, weights, gate_EFD, up_EFD, down_EDF, rows)
    rows_RD, same_RD = ToRowsTwice.apply(hidden_TD, rows, fuse)
    gate_EF, up_EF, down_ED = biases or (None, None, None)
    gate_RF = grouped_linear(rows_RD, rows.ends_E, gate_EFD, gate_EF)
    up_RF = grouped_linear(same_RD, rows.ends_E, up_EFD, up_EF)
    if weights_TK is None:
        inner_RF = fuse(gated, gate_RF, up_RF, swiglu_limit=swiglu_limit, rows_vary=True)
        return FromRows.apply(grouped_linear(inner_RF, rows.ends_E, down_EDF, down_ED), rows.rows_TK[:, 0])
    weights_R1 = WeightsToRows.apply(weights_TK.to(hidden_TD.dtype), rows)
    inner_RF = fuse(weighted, gate_RF, up_RF, weights_R1, swiglu_limit=swiglu_limit, rows_vary=True)
    result_RD = grouped_linear(inner_RF, rows.ends_E, down_EDF, down_ED, weights_R1)
    return SumRows.apply(result_RD, rows, fuse)


def gated(gate: Tensor, up: Tensor, swiglu_limit: float | None) -> Tensor:
    """SwiGLU's inner value, silu(gate) * up; with a limit (up + 1) * gate * sigmoid(GATE_SLOPE * gate), both clamped.

    The second as gpt-oss has it (arXiv:2508.10925, section 2.3): the gate is at most the limit, and up within +- it.
    """
    if swiglu_limit is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return (up + 1) * (gate * torch.sigmoid(GATE_SLOPE * gate))


def weighted(gate_RF: Tensor, up_RF: Tensor, weights_R1: Tensor, *, swiglu_limit: float | None) -> Tensor:
    """``gated``, each row times its weight."""
    return gated(gate_RF, up_RF, swiglu_limit) * weights_R1


def gathered_sum(rows_RD: Tensor, rows_TK: Tensor) -> Tensor:
    """Each token's sum of its K rows (T, D)."""
    return rows_RD.index_select(0, rows_TK.flatten()).view(*rows_TK.shape, rows_RD.shape[1]).sum(1)


def gathered_sum_of_two(rows_RD: Tensor, others_RD: Tensor, rows_TK: Tensor) -> Tensor:
    """Each token's sum of its K rows of both tensors (T, D)."""
    return gathered_sum(rows_RD, rows_TK) + gathered_sum(others_RD, rows_TK)


def summed(rows_RD: Tensor, rows_TK: Tensor, fuse: Fuse) -> Tensor:
    """``gathered_sum``, as the device does it best."""
    if rows_RD.is_cpu:
        return sum_of_rows(rows_RD, rows_TK)
    return fuse(gathered_sum, rows_RD, rows_TK, rows_vary=True)


def grouped_linear(
    rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None, factors_R1: Tensor | None = None
) -> Tensor:
    """Each row times its expert's matrix, (R, O), and its bias; expert e's rows end before ``ends_E[e]``.

    A bias is one more matrix product, with ones: its gradient is then summed as the matrices' are, in a fixed order.
    ``factors_R1`` multiply a row's bias.
    """
    out_RO = F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=ends_E)
    if bias_EO is None:
        return out_RO
    ones_RI = rows_RI.new_ones(rows_RI.shape[0], ONES)
    ones_RI = ones_RI if factors_R1 is None else ones_RI * factors_R1
    return out_RO + F.grouped_mm(ones_RI, F.pad(bias_EO[:, None], (0, 0, 0, ONES - 1)), offs=ends_E)


def count_pairs(indices_TK: Tensor, n_experts: int) -> Tensor:
    """The pairs of each expert (E,), int64.

    Unlike torch.bincount, whose output's size depends on the values, it does not make the host wait for the GPU.
    """
    experts_P = indices_TK.flatten().long()
    return experts_P.new_zeros(n_experts).scatter_add_(0, experts_P, torch.ones_like(experts_P))


def place_rows(indices_TK: Tensor, counts_E: Tensor, row_multiple: int) -> Rows:
    """The pairs' rows. Each expert's are rounded up to ``row_multiple``."""
    padded_E = (counts_E + row_multiple - 1) // row_multiple * row_multiple
    first_E, ends_E = counts_E.cumsum(0) - counts_E, padded_E.cumsum(0)
    experts_P = indices_TK.flatten()
    order_P = experts_P.argsort(stable=True)  # pairs in the order of their experts
    tokens_P = order_P // indices_TK.shape[1]
    sorted_rows_P = torch.arange(experts_P.numel(), device=experts_P.device)
    tokens_R = tokens_P
    if row_multiple > 1:
        sorted_rows_P = sorted_rows_P + (ends_E - padded_E - first_E)[experts_P[order_P]]
        tokens_R = tokens_P[first_E.repeat_interleave(padded_E)].index_copy_(0, sorted_rows_P, tokens_P)
    rows_P = torch.empty_like(order_P).index_copy_(0, order_P, sorted_rows_P)
    return Rows(rows_P.view_as(indices_TK), tokens_R, ends_E.to(torch.int32))


class ToRows(Function):
    """hidden_TD -> rows_RD: copies each token to its K rows. Backward sums the K rows.

    Nobody looks at what comes of rows that no pair takes, so their gradient is zero.
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
    """``ToRows`` for two products: the same rows twice. Backward sums the K rows of both gradients.

    Compiled, both are read once; autograd itself would write their sum, row by row, and read it again.
    """

    @staticmethod
    def forward(ctx, hidden_TD: Tensor, rows: Rows, fuse: Fuse) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.save_for_backward(rows.rows_TK)
        ctx.fuse = fuse
        rows_RD = hidden_TD.index_select(0, rows.tokens_R)
        return rows_RD, rows_RD.view_as(rows_RD)

    @staticmethod
    def backward(ctx, grad_RD: Tensor, other_RD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (rows_TK,) = ctx.saved_tensors
        if grad_RD.is_cpu or ctx.fuse is plainly:
            return sum_of_rows(grad_RD + other_RD, rows_TK), None, None
        return ctx.fuse(gathered_sum_of_two, grad_RD, other_RD, rows_TK, rows_vary=True), None, None


class SumRows(Function):
    """rows_RD -> out_TD: each token's sum of its K rows. Backward copies each token's gradient to its K rows.

    The transpose of ``ToRows``. Rows nobody takes get a gradient too: their factor of 0 must drop it.
    """

    @staticmethod
    def forward(ctx, rows_RD: Tensor, rows: Rows, fuse: Fuse) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows.tokens_R)
        return summed(rows_RD, rows.rows_TK, fuse)

    @staticmethod
    def backward(ctx, grad_TD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (tokens_R,) = ctx.saved_tensors
        return grad_TD.index_select(0, tokens_R), None, None


class WeightsToRows(Function):
    """weights_TK -> weights_R1: each pair's weight in its row, 0 in rows nobody takes."""

    @staticmethod
    def forward(ctx, weights_TK: Tensor, rows: Rows) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows.rows_TK)
        return weights_to_rows(weights_TK, rows)

    @staticmethod
    def backward(ctx, grad_R1: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (rows_TK,) = ctx.saved_tensors
        return grad_R1[:, 0].index_select(0, rows_TK.flatten()).view_as(rows_TK), None


class FromRows(Function):
    """rows_RD -> result_PD: brings each pair's row back. Rows are distinct, so the backward is a plain copy.

    Rows nobody takes get a gradient of zero.
    """

    @staticmethod
    def forward(ctx, rows_RD: Tensor, rows_P: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows_P)
        ctx.n_rows = rows_RD.shape[0]
        return rows_RD.index_select(0, rows_P)

    @staticmethod
    def backward(ctx, grad_PD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (rows_P,) = ctx.saved_tensors
        return grad_PD.new_zeros(ctx.n_rows, grad_PD.shape[-1]).index_copy_(0, rows_P, grad_PD), None
