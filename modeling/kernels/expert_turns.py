"""The experts' SwiGLU one expert after another, on a CPU: what is made of an expert's rows stays in a core's cache.

Shape letters: T tokens, K top_k, R rows (token-expert pairs, padded), N rows of one expert, D d_model, F d_ff, I 2F.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from modeling.kernels.scratch import SCRATCH


class Rows(NamedTuple):
    """Where each token-expert pair goes once sorted by expert.

    rows_TK: a distinct row for each pair, expert by expert, each expert's rows in the order of the tokens. tokens_R:
    each row's token; in rows that no pair takes, the token of the expert's first row, so that nothing overflows there
    alone. ends_E: int32, where each expert's rows end.
    """

    rows_TK: Tensor
    tokens_R: Tensor
    ends_E: Tensor


class ExpertsByTurn(Function):
    """(hidden_TD, weights_TK, gate_EFD, up_EFD, down_EDF, rows) -> each token's weighted sum of its experts' SwiGLUs.

    Weights have the hidden states' dtype. Kept for the backward pass are what enters and leaves the products by gate
    and up: an expert's tokens are gathered again there. All else is written into ``SCRATCH``.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_TD: Tensor, weights_TK: Tensor, gate_EFD: Tensor, up_EFD: Tensor, down_EDF: Tensor, rows: Rows
    ) -> Tensor:
        n_rows, (_, d_ff, d_model) = len(rows.tokens_R), gate_EFD.shape
        gate_up_RI = hidden_TD.new_empty(n_rows, 2 * d_ff)
        out_RD = SCRATCH.take("rows", (n_rows, d_model), hidden_TD)
        matrices = list(zip(gate_EFD, up_EFD, down_EDF, strict=True))
        for expert, part in parts_of(rows):
            gate_FD, up_FD, down_DF = matrices[expert]
            hidden_ND = gathered("hidden", hidden_TD, rows.tokens_R[part])
            gate_up_NI = torch.mm(hidden_ND, joined(gate_FD, up_FD).T, out=gate_up_RI[part])
            gate_NF, up_NF = gate_up_NI.chunk(2, dim=1)
            inner_NF = silu(gate_NF, "inner").mul_(up_NF)
            torch.mm(inner_NF, down_DF.T, out=out_RD[part])
        ctx.save_for_backward(hidden_TD, weights_TK, gate_up_RI, gate_EFD, up_EFD, down_EDF)
        ctx.rows = rows
        return sum_of_rows(out_RD, rows.rows_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_TD, weights_TK, gate_up_RI, gate_EFD, up_EFD, down_EDF = ctx.saved_tensors
        rows: Rows = ctx.rows
        n_rows, (_, d_ff, d_model) = len(rows.tokens_R), gate_EFD.shape
        weights_R1 = weights_to_rows(weights_TK, rows)
        grad_gate_EFD, grad_up_EFD, grad_down_EDF = (torch.zeros_like(each) for each in (gate_EFD, up_EFD, down_EDF))
        grad_RD = SCRATCH.take("rows", (n_rows, d_model), hidden_TD)
        grad_weights_R = weights_R1.new_empty(n_rows)
        matrices = list(zip(gate_EFD, up_EFD, down_EDF, strict=True))
        for expert, part in parts_of(rows):
            gate_FD, up_FD, down_DF = matrices[expert]
            tokens_N, weights_N1 = rows.tokens_R[part], weights_R1[part]
            hidden_ND, grad_ND = gathered("hidden", hidden_TD, tokens_N), gathered("grad", grad_TD, tokens_N)
            gate_NF, up_NF = gate_up_RI[part].chunk(2, dim=1)
            activated_NF = silu(gate_NF, "activated")
            inner_NF = torch.mul(activated_NF, up_NF, out=taken("inner", gate_NF))
            grad_inner_NF = torch.mm(grad_ND, down_DF, out=taken("grad_inner", gate_NF))
            product_NF = torch.mul(grad_inner_NF, inner_NF, out=taken("product", gate_NF))
            torch.sum(product_NF, 1, out=grad_weights_R[part])
            torch.mm(grad_ND.T, inner_NF.mul_(weights_N1), out=grad_down_EDF[expert])
            grad_inner_NF.mul_(weights_N1)
            grad_NI = taken("grad_gate_up", gate_up_RI[part])
            torch.mul(grad_inner_NF, activated_NF, out=grad_NI[:, d_ff:])
            torch.ops.aten.silu_backward.grad_input(grad_inner_NF.mul_(up_NF), gate_NF, grad_input=grad_NI[:, :d_ff])
            grad_ID = torch.mm(grad_NI.T, hidden_ND, out=SCRATCH.take("grad_matrix", (2 * d_ff, d_model), gate_FD))
            grad_gate_EFD[expert], grad_up_EFD[expert] = grad_ID[:d_ff], grad_ID[d_ff:]
            torch.mm(grad_NI, joined(gate_FD, up_FD), out=grad_RD[part])
        grad_hidden_TD = sum_of_rows(grad_RD, rows.rows_TK)
        grad_weights_TK = grad_weights_R.index_select(0, rows.rows_TK.flatten()).view_as(rows.rows_TK)
        return grad_hidden_TD, grad_weights_TK, grad_gate_EFD, grad_up_EFD, grad_down_EDF, None


def taken(name: str, like: Tensor) -> Tensor:
    """Scratch of a tensor's shape."""
    return SCRATCH.take(name, tuple(like.shape), like)


def gathered(name: str, values_TD: Tensor, tokens_N: Tensor) -> Tensor:
    """The tokens' rows (N, D), in scratch."""
    out_ND = SCRATCH.take(name, (len(tokens_N), values_TD.shape[1]), values_TD)
    return torch.ops.aten.index_select.out(values_TD, 0, tokens_N, out=out_ND)


def joined(gate_FD: Tensor, up_FD: Tensor) -> Tensor:
    """Both matrices below each other (I, D), in scratch: one product by both is faster than two."""
    d_ff, d_model = gate_FD.shape
    return torch.cat([gate_FD, up_FD], out=SCRATCH.take("gate_up", (2 * d_ff, d_model), gate_FD))


def silu(gate_NF: Tensor, name: str) -> Tensor:
    """The activated gates, in scratch."""
    return torch.ops.aten.silu.out(gate_NF, out=taken(name, gate_NF))


def parts_of(rows: Rows) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and its rows."""
    start = 0
    for expert, end in enumerate(rows.ends_E.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end


def weights_to_rows(weights_TK: Tensor, rows: Rows) -> Tensor:
    """weights_R1: each pair's weight in its row, 0 in rows nobody takes."""
    weights_R = weights_TK.new_zeros(rows.tokens_R.shape)
    return weights_R.index_copy_(0, rows.rows_TK.flatten(), weights_TK.flatten())[:, None]


def sum_of_rows(rows_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Each token's sum of its K rows (T, D), on a CPU weighted where there are weights, of the rows' dtype.

    On a CPU in one pass: copying all rows first took 8 times as long (7.4 instead of 0.9 ms, 16384 rows of 384 in bf16,
    one thread, Intel with AMX, 2026-11-23).
    """
    if rows_RD.is_cpu:
        return F.embedding_bag(rows_TK, rows_RD, mode="sum", per_sample_weights=weights_TK)
    assert weights_TK is None
    return rows_RD.index_select(0, rows_TK.flatten()).view(*rows_TK.shape, rows_RD.shape[1]).sum(1)
