"""The experts' SwiGLU on a CPU, one expert after another, so that an expert's values stay in a core's cache.

In fp32, and in bf16 on a processor that multiplies it, both passes of narrow experts are in C++ (expert_passes.py).

Shape letters: T tokens, K top_k, R rows (token-expert pairs, padded), N rows of one expert, M the most of them, D
d_model, F d_ff, I 2F.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from modeling.kernels import expert_passes
from modeling.kernels.expert_passes import Gates, Given, Gradients, Matrices
from modeling.kernels.row_counts import row_counts
from modeling.kernels.scratch import SCRATCH, is_real
from modeling.kernels.stand_ins import stand_in

aten = torch.ops.aten


class Rows(NamedTuple):
    """Where each token-expert pair goes once sorted by expert.

    rows_TK: a distinct row for each pair, expert by expert, each expert's rows in the order of the tokens. tokens_R:
    each row's token; in rows of padding, the token of the expert's first row, so that they overflow only if that row
    does. ends_E: int32, where each expert's rows end. row_multiple: the unit to which each expert's rows were rounded
    up; 1 means not at all.
    """

    rows_TK: Tensor
    tokens_R: Tensor
    ends_E: Tensor
    row_multiple: int = 1


def experts_by_turn(
    hidden_TD: Tensor,
    weights_TK: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    rows: Rows,
    kept_share: float = 1.0,
) -> Tensor:
    """Each token's sum of weighted SwiGLUs (T, D). Weights have the hidden states' dtype.

    For the backward pass it keeps the layer's inputs, and the gate and up projections of at most ``kept_share`` of the
    rows. Backward gathers each expert's tokens again, and computes the other rows' projections again. All else is
    written into ``SCRATCH``. With a share of 0 autograd has all that it keeps before anything is computed, so a layer
    that is recomputed for its saved tensors, and has none after this, computes no expert.
    """
    given = (hidden_TD, weights_TK, gate_EFD, up_EFD, down_EDF)
    if kept_share:
        return ExpertsByTurn.apply(*given, rows, kept_share)
    out_TD = ExpertsByTurn.apply(*given, rows, 0.0)
    with torch.no_grad():
        nowhere_0I = hidden_TD.new_empty(0, 2 * gate_EFD.shape[1])
        return out_TD.copy_(sums_by_turn(*given, rows, GatesAndUps(nowhere_0I, sizes_of(rows))))


def sums_by_turn(
    hidden_TD: Tensor,
    weights_TK: Tensor,
    gate_EFD: Tensor,
    up_EFD: Tensor,
    down_EDF: Tensor,
    rows: Rows,
    gates_and_ups: "GatesAndUps",
) -> Tensor:
    """The forward pass of ``experts_by_turn``, without a graph. Projections are written into ``gates_and_ups``."""
    out_RD = SCRATCH.take("rows", (len(rows.tokens_R), gate_EFD.shape[2]), hidden_TD)
    matrices, gates = Matrices(gate_EFD, up_EFD, down_EDF), gates_and_ups.gates
    if expert_passes.fits(hidden_TD, matrices):
        expert_passes.forward(matrices, hidden_TD, rows.tokens_R, gates, out_RD)
    else:
        stand_in(
            lambda: expert_passes.kernel("forward", hidden_TD, matrices, gates),
            hidden_TD,
            lambda: products_by_turn(matrices, hidden_TD, rows.tokens_R, gates_and_ups, out_RD),
            lambda: None,
        )
    return sum_of_rows(out_RD, rows.rows_TK, weights_TK)


def products_by_turn(
    matrices: Matrices, hidden_TD: Tensor, tokens_R: Tensor, gates_and_ups: "GatesAndUps", out_RD: Tensor
) -> None:
    """Computes the SwiGLU of each row's token into ``out_RD``, not weighted, by torch's products."""
    gate_EFD, up_EFD, down_EDF = matrices
    sizes_E, (_, d_ff, d_model) = gates_and_ups.sizes_E, gate_EFD.shape
    rooms = rooms_of(sizes_E, hidden_TD, {"hidden": d_model, "inner": d_ff})
    gate_up_ID = SCRATCH.take("gate_up", (2 * d_ff, d_model), gate_EFD)
    gate_up_DI = gate_up_ID.T
    each_expert = list(zip(gate_EFD.unbind(), up_EFD.unbind(), down_EDF.mT.unbind(), strict=True))
    for expert, n, (tokens_N, out_ND) in turns(sizes_E, tokens_R, out_RD):
        gate_FD, up_FD, down_FD = each_expert[expert]
        gate_up_NI, gate_NF, up_NF = gates_and_ups.of(expert)
        hidden_ND, inner_NF = rooms(n)
        torch.index_select(hidden_TD, 0, tokens_N, out=hidden_ND)
        torch.cat((gate_FD, up_FD), out=gate_up_ID)  # one product by both is faster than two
        torch.mm(hidden_ND, gate_up_DI, out=gate_up_NI)
        gates_and_ups.keep_part(expert, gate_up_NI)
        aten.silu.out(gate_NF, out=inner_NF).mul_(up_NF)
        torch.mm(inner_NF, down_FD, out=out_ND)


class ExpertsByTurn(Function):
    """The autograd node of ``experts_by_turn``.

    With a ``kept_share`` of 0 its value is left to be computed afterwards.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_TD: Tensor,
        weights_TK: Tensor,
        gate_EFD: Tensor,
        up_EFD: Tensor,
        down_EDF: Tensor,
        rows: Rows,
        kept_share: float,
    ) -> Tensor:
        given = (hidden_TD, weights_TK, gate_EFD, up_EFD, down_EDF)
        ctx.rows, ctx.sizes_E = rows, sizes_of(rows)
        if any(ctx.needs_input_grad) and not expert_passes.has_passes(hidden_TD, Matrices(gate_EFD, up_EFD, down_EDF)):
            build_matmul_kernels(max(ctx.sizes_E), len(hidden_TD), rows.row_multiple, gate_EFD)
        gate_up_RI = hidden_TD.new_empty(int(len(rows.tokens_R) * kept_share), 2 * gate_EFD.shape[1])
        ctx.save_for_backward(hidden_TD, weights_TK, gate_up_RI, gate_EFD, up_EFD, down_EDF)
        if not kept_share:
            return torch.empty_like(hidden_TD)
        return sums_by_turn(*given, rows, GatesAndUps(gate_up_RI, ctx.sizes_E))

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_TD, weights_TK, gate_up_RI, gate_EFD, up_EFD, down_EDF = ctx.saved_tensors
        rows, sizes_E = ctx.rows, ctx.sizes_E
        n_rows, d_model = len(rows.tokens_R), hidden_TD.shape[1]
        matrices = Matrices(gate_EFD, up_EFD, down_EDF)
        gradients = Matrices(*(torch.empty_like(each) for each in matrices))
        for expert in (expert for expert, n in enumerate(sizes_E) if n == 0):
            for gradient in gradients:
                gradient[expert].zero_()
        weights_R1 = weights_to_rows(weights_TK, rows)
        grad_weights_R = weights_R1.new_empty(n_rows)
        grad_RD = SCRATCH.take("rows", (n_rows, d_model), hidden_TD)
        gradients_by_turn(
            Given(matrices, hidden_TD, grad_TD, rows.tokens_R, weights_R1),
            GatesAndUps(gate_up_RI, sizes_E),
            Gradients(gradients, grad_RD, grad_weights_R),
        )
        grad_hidden_TD = sum_of_rows(grad_RD, rows.rows_TK)
        grad_weights_TK = grad_weights_R.index_select(0, rows.rows_TK.flatten()).view_as(rows.rows_TK)
        return grad_hidden_TD, grad_weights_TK, *gradients, None, None


def gradients_by_turn(given: Given, gates_and_ups: "GatesAndUps", gradients: Gradients) -> None:
    """The backward pass of ``experts_by_turn``, all rows apart, into ``gradients``."""
    gates = gates_and_ups.gates
    if expert_passes.fits(given.hidden_TD, given.matrices):
        expert_passes.backward(given, gates, gradients)
        return
    stand_in(
        lambda: expert_passes.kernel("backward", given.hidden_TD, given.matrices, gates),
        given.hidden_TD,
        lambda: gradients_by_torch(given, gates_and_ups, gradients),
        lambda: None,
    )


def gradients_by_torch(given: Given, gates_and_ups: "GatesAndUps", gradients: Gradients) -> None:
    """``gradients_by_turn`` by torch's products."""
    (gate_EFD, up_EFD, down_EDF), hidden_TD, grad_TD, tokens_R, weights_R1 = given
    sizes_E, (_, d_ff, d_model) = gates_and_ups.sizes_E, gate_EFD.shape
    rooms = rooms_of(sizes_E, hidden_TD, {"hidden": d_model, "grad": d_model, "grad_gate_up": 2 * d_ff})
    names_NF = ("inner", "activated", "product", "grad_inner")
    rooms_NF = rooms_of(sizes_E, hidden_TD, dict.fromkeys(names_NF, d_ff))
    gate_up_ID, grad_ID = (SCRATCH.take(name, (2 * d_ff, d_model), gate_EFD) for name in ("gate_up", "grad_matrix"))
    gate_up_DI, (from_gate_FD, from_up_FD) = gate_up_ID.T, grad_ID.chunk(2)
    matrices = list(zip(gate_EFD.unbind(), up_EFD.unbind(), down_EDF.unbind(), strict=True))
    grads = list(zip(*(each.unbind() for each in gradients.matrices), strict=True))
    parts = turns(sizes_E, tokens_R, weights_R1, gradients.weights_R, gradients.rows_RD)
    for expert, n, (tokens_N, weights_N1, grad_weights_N, grad_hidden_ND) in parts:
        (gate_FD, up_FD, down_DF), (grad_gate_FD, grad_up_FD, grad_down_DF) = matrices[expert], grads[expert]
        gate_up_NI, gate_NF, up_NF = gates_and_ups.of(expert)
        hidden_ND, grad_ND, grad_NI = rooms(n)
        inner_NF, activated_NF, product_NF, grad_inner_NF = rooms_NF(n)
        torch.index_select(hidden_TD, 0, tokens_N, out=hidden_ND)
        torch.cat((gate_FD, up_FD), out=gate_up_ID)
        if not gates_and_ups.has(expert):
            torch.mm(hidden_ND, gate_up_DI, out=gate_up_NI)
        torch.index_select(grad_TD, 0, tokens_N, out=grad_ND)
        aten.silu.out(gate_NF, out=activated_NF)
        torch.mul(activated_NF, up_NF, out=inner_NF)
        torch.mm(grad_ND, down_DF, out=grad_inner_NF)
        torch.sum(torch.mul(grad_inner_NF, inner_NF, out=product_NF), 1, out=grad_weights_N)
        torch.mm(grad_ND.T, inner_NF.mul_(weights_N1), out=grad_down_DF)
        grad_inner_NF.mul_(weights_N1)
        grad_gate_NF, grad_up_NF = grad_NI.chunk(2, 1)
        torch.mul(grad_inner_NF, activated_NF, out=grad_up_NF)
        aten.silu_backward.grad_input(grad_inner_NF.mul_(up_NF), gate_NF, grad_input=grad_gate_NF)
        torch.mm(grad_NI.T, hidden_ND, out=grad_ID)
        grad_gate_FD.copy_(from_gate_FD)
        grad_up_FD.copy_(from_up_FD)
        torch.mm(grad_NI, gate_up_ID, out=grad_hidden_ND)


class Once:
    """A stand-in for the context of an autograd Function, to call its passes outside of autograd."""

    needs_input_grad = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keeps the tensors as ``saved_tensors``, without autograd's checks."""
        self.saved_tensors = tensors


# (D, F, dtype) -> the numbers of rows for which this process has built an expert's products.
BUILT: dict[tuple[int, int, torch.dtype], set[int]] = {}


def build_matmul_kernels(n_rows: int, most_rows: int, row_multiple: int, gate_EFD: Tensor) -> None:
    """Has oneDNN build an expert's products for ``n_rows`` and all numbers near it, in both passes, once a process.

    ``most_rows``, the layer's tokens, is the most that an expert can have. Otherwise new numbers of rows would come for
    hundreds of steps, each adding 4 MB of memory (docs/measurements.md).
    """
    if row_multiple == 1 or not is_real(gate_EFD) or not is_built_by_rows(gate_EFD.dtype):
        return
    _, d_ff, d_model = gate_EFD.shape
    built = BUILT.setdefault((d_model, d_ff, gate_EFD.dtype), set())
    missing = [n for n in row_counts(row_multiple, n_rows, most_rows) if n not in built]
    if not missing:
        return
    built.update(missing)
    gate_1FD, down_1DF = gate_EFD.new_zeros(1, d_ff, d_model), gate_EFD.new_zeros(1, d_model, d_ff)
    token_1D, weight_11 = gate_EFD.new_zeros(1, d_model), gate_EFD.new_ones(1, 1)
    for n in reversed(missing):  # the largest first, so that scratch is made once
        tokens_R, ctx = torch.zeros(n, dtype=torch.long), Once()
        rows = Rows(tokens_R[:1, None], tokens_R, torch.tensor([n], dtype=torch.int32))
        ExpertsByTurn.forward(ctx, token_1D, weight_11, gate_1FD, gate_1FD, down_1DF, rows, 1.0)
        ExpertsByTurn.backward(ctx, token_1D)


@functools.cache
def is_built_by_rows(dtype: torch.dtype) -> bool:
    """Whether oneDNN has native products of that dtype for this processor.

    Its other ones are slow, and it never keeps them.

    Builds of torch without oneDNN lack the operators that tell.
    """
    teller = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    return teller is not None and hasattr(torch.ops.mkldnn, teller) and bool(getattr(torch.ops.mkldnn, teller)())


class GatesAndUps:
    """The gate and up projections of all experts: in ``gate_up_RI`` as far as they fit, otherwise in scratch.

    Experts are placed there from the one with most rows down; one that has more rows than are left is skipped. What is
    left then takes as many rows of the largest one that was skipped. Only C++ reads those again.
    """

    def __init__(self, gate_up_RI: Tensor, sizes_E: list[int]) -> None:
        self.sizes_E, self.kept_E = sizes_E, [0] * len(sizes_E)
        left, skipped = len(gate_up_RI), list[int]()
        for expert in sorted(range(len(sizes_E)), key=lambda expert: -sizes_E[expert]):
            if sizes_E[expert] <= left:
                self.kept_E[expert] = sizes_E[expert]
                left -= sizes_E[expert]
            else:
                skipped.append(expert)
        if skipped:
            self.kept_E[skipped[0]] = left // expert_passes.UNIT * expert_passes.UNIT
        self.gates = Gates(gate_up_RI, sizes_E, self.kept_E)

    @functools.cached_property
    def kept(self) -> list[tuple[Tensor, ...]]:
        """For each expert its rows that are kept: (gates and ups side by side, gates, ups). C++ does not ask."""
        gate_up_RI = self.gates.gate_up_RI
        both = (gate_up_RI, *gate_up_RI.chunk(2, 1))
        cut = [each_RX[: sum(self.kept_E)].split(self.kept_E) for each_RX in both]
        return list(zip(*cut, strict=True))

    @functools.cached_property
    def spare(self) -> Callable[[int], list[Tensor]]:
        """Scratch for the projections of an expert of which not all are kept, by its number of rows."""
        gate_up_RI = self.gates.gate_up_RI
        return rooms_of(self.sizes_E, gate_up_RI, {"gate_up_again": gate_up_RI.shape[1]})

    def has(self, expert: int) -> bool:
        """Whether all projections of an expert are kept."""
        return self.kept_E[expert] == self.sizes_E[expert]

    def keep_part(self, expert: int, gate_up_NI: Tensor) -> None:
        """Keeps an expert's first projections, if they are kept without its others."""
        if 0 < self.kept_E[expert] < self.sizes_E[expert]:
            self.kept[expert][0].copy_(gate_up_NI[: self.kept_E[expert]])

    def of(self, expert: int) -> tuple[Tensor, ...]:
        """An expert's projections: both side by side (N, I), gates (N, F) and ups (N, F).

        Those that are not kept are valid until the next expert's are asked for.
        """
        if self.kept_E[expert] == self.sizes_E[expert]:
            return self.kept[expert]
        (gate_up_NI,) = self.spare(self.sizes_E[expert])
        return gate_up_NI, *gate_up_NI.chunk(2, 1)


def rooms_of(sizes_E: list[int], like: Tensor, widths: dict[str, int]) -> Callable[[int], list[Tensor]]:
    """Scratch for the rows of one expert at a time: a function n -> one tensor (n, its width) for each name.

    Slices are made once for each number of rows, of which there are few in 16 bits.
    """
    whole = [SCRATCH.take(name, (max(sizes_E), width), like) for name, width in widths.items()]
    return functools.cache(lambda n: [each_MX[:n] for each_MX in whole])


def sizes_of(rows: Rows) -> list[int]:
    """The number of rows of each expert."""
    ends_E = rows.ends_E.tolist()
    return [end - start for start, end in zip([0, *ends_E], ends_E, strict=False)]


def turns(sizes_E: list[int], *rows_RX: Tensor) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """Yields each expert that has rows: its number, how many rows it has, and its rows of each tensor.

    Tensors are split all at once, which is faster than slicing them. Rows after the last expert's belong to no expert;
    when a step is traced without values, most rows do.
    """
    cut = zip(*(each_RX[: sum(sizes_E)].split(sizes_E) for each_RX in rows_RX), strict=True)
    return ((expert, n, parts) for expert, (n, parts) in enumerate(zip(sizes_E, cut, strict=True)) if n)


def weights_to_rows(weights_TK: Tensor, rows: Rows) -> Tensor:
    """weights_R1: each pair's weight in its row, 0 in rows of padding."""
    weights_R = weights_TK.new_zeros(rows.tokens_R.shape)
    return weights_R.index_copy_(0, rows.rows_TK.flatten(), weights_TK.flatten())[:, None]


def sum_of_rows(rows_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Each token's sum of its K rows (T, D), in the rows' dtype; on a CPU multiplied by ``weights_TK``, if given.

    On a CPU in one pass: copying all rows first took 8 times as long (7.4 instead of 0.9 ms, 16384 rows of 384 in bf16,
    one thread, Intel with AMX, 2026-11-23).
    """
    if rows_RD.is_cpu:
        return F.embedding_bag(rows_TK, rows_RD, mode="sum", per_sample_weights=weights_TK)
    assert weights_TK is None
    if rows_TK.shape[1] == 1:
        return rows_RD.index_select(0, rows_TK[:, 0])
    return rows_RD.index_select(0, rows_TK.flatten()).view(*rows_TK.shape, rows_RD.shape[1]).sum(1)
