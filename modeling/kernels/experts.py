"""The experts' SwiGLU over tokens sorted by expert, as grouped matrix products.

Shape letters: T tokens, K top_k, R rows (token-expert pairs, padded), E experts, D d_model, F d_ff.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

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
    weights_TK: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    biases: ExpertBiases | None = None,
    swiglu_limit: float | None = None,
    row_multiple: int | None = None,
) -> Tensor:
    """Each token's weighted sum of its experts' SwiGLUs (T, D), by grouped matrix products over all experts.

    Deterministic in both directions. ``swiglu_limit``: as ``gated`` has it. Each expert's rows are rounded up to
    ``row_multiple`` (None: what is fast on the device).
    """
    counts_E = count_pairs(indices_TK, gate_EFD.shape[0])
    if row_multiple is None:
        row_multiple = 1 if hidden_TD.is_cuda else CPU_ROW_MULTIPLE
    rows_TK, ends_E, n_rows = place_rows(indices_TK, counts_E, row_multiple)
    rows_RD = ToRows.apply(hidden_TD, rows_TK, n_rows)
    gate_EF, up_EF, down_ED = biases or (None, None, None)
    gate_RF = grouped_linear(rows_RD, ends_E, gate_EFD, gate_EF)
    up_RF = grouped_linear(rows_RD, ends_E, up_EFD, up_EF)
    result_RD = grouped_linear(gated(gate_RF, up_RF, swiglu_limit), ends_E, down_EDF, down_ED)
    result_TKD = FromRows.apply(result_RD, rows_TK)
    return (result_TKD * weights_TK[..., None].to(hidden_TD.dtype)).sum(1)


def gated(gate: Tensor, up: Tensor, swiglu_limit: float | None) -> Tensor:
    """SwiGLU's inner value, silu(gate) * up; with a limit (up + 1) * gate * sigmoid(GATE_SLOPE * gate), both clamped.

    The second as gpt-oss has it (arXiv:2508.10925, section 2.3): the gate is at most the limit, and up within +- it.
    """
    if swiglu_limit is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=swiglu_limit), up.clamp(-swiglu_limit, swiglu_limit)
    return (up + 1) * (gate * torch.sigmoid(GATE_SLOPE * gate))


def grouped_linear(rows_RI: Tensor, ends_E: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> Tensor:
    """Each row times its expert's matrix, (R, O), and its bias; expert e's rows end before ``ends_E[e]``.

    A bias is one more matrix product, with ones: its gradient is then summed as the matrices' are, in a fixed order.
    """
    out_RO = F.grouped_mm(rows_RI, weight_EOI.transpose(1, 2), offs=ends_E)
    if bias_EO is None:
        return out_RO
    ones_RI = rows_RI.new_ones(rows_RI.shape[0], ONES)
    return out_RO + F.grouped_mm(ones_RI, F.pad(bias_EO[:, None], (0, 0, 0, ONES - 1)), offs=ends_E)


def count_pairs(indices_TK: Tensor, n_experts: int) -> Tensor:
    """The pairs of each expert (E,), int64.

    Unlike torch.bincount, whose output's size depends on the values, it does not make the host wait for the GPU.
    """
    experts_P = indices_TK.flatten().long()
    return experts_P.new_zeros(n_experts).scatter_add_(0, experts_P, torch.ones_like(experts_P))


def place_rows(indices_TK: Tensor, counts_E: Tensor, row_multiple: int) -> tuple[Tensor, Tensor, int]:
    """Where each token-expert pair goes once sorted by expert.

    Returns rows_TK (a distinct row for each pair, expert by expert, each expert's rows in the order of the tokens),
    ends_E (int32, where each expert's rows end, rounded up to ``row_multiple``) and the number of rows.
    """
    padded_E = (counts_E + row_multiple - 1) // row_multiple * row_multiple
    ends_E = padded_E.cumsum(0)
    experts_P = indices_TK.flatten()
    order_P = experts_P.argsort(stable=True)  # pairs in the order of their experts
    sorted_P = experts_P[order_P]
    rank_P = torch.arange(experts_P.numel(), device=experts_P.device) - (counts_E.cumsum(0) - counts_E)[sorted_P]
    rows_P = torch.empty_like(order_P)
    rows_P[order_P] = (ends_E - padded_E)[sorted_P] + rank_P
    n_rows = experts_P.numel() if row_multiple == 1 else int(ends_E[-1])
    return rows_P.view_as(indices_TK), ends_E.to(torch.int32), n_rows


class ToRows(Function):
    """hidden_TD -> rows_RD: copies each token to its K rows; rows nobody takes are zero. Backward sums the K rows."""

    @staticmethod
    def forward(ctx, hidden_TD: Tensor, rows_TK: Tensor, n_rows: int) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows_TK)
        rows_RD = hidden_TD.new_zeros(n_rows, hidden_TD.shape[1])
        for slot in range(rows_TK.shape[1]):
            rows_RD.index_copy_(0, rows_TK[:, slot], hidden_TD)
        return rows_RD

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (rows_TK,) = ctx.saved_tensors
        return grad_RD[rows_TK].sum(1), None, None


class FromRows(Function):
    """rows_RD -> result_TKD: brings each pair's row back. Rows are distinct, so the backward is a plain copy."""

    @staticmethod
    def forward(ctx, rows_RD: Tensor, rows_TK: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(rows_TK)
        ctx.n_rows = rows_RD.shape[0]
        return rows_RD[rows_TK]

    @staticmethod
    def backward(ctx, grad_TKD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (rows_TK,) = ctx.saved_tensors
        grad_RD = grad_TKD.new_zeros(ctx.n_rows, grad_TKD.shape[-1])
        return grad_RD.index_copy_(0, rows_TK.flatten(), grad_TKD.flatten(0, 1)), None
