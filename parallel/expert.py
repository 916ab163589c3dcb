"""Expert parallelism: tokens travel to the ranks that hold their experts, and back. Dropless.

Shape letters: T tokens, K top_k, R rows (token-expert pairs), E experts, D d_model, F d_ff.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.kernels.experts import (
    ExpertBiases,
    ToRows,
    WeightedSumRows,
    count_pairs,
    experts_over_rows,
    place_blocks,
    place_rows,
    row_multiple_of,
)
from modeling.kernels.fuse import Fuse
from modeling.kernels.products import Products
from modeling.moe import ComputeExperts, ExpertDispatch
from parallel.collectives import RowExchange, exchange_rows
from parallel.mesh import Axis

# (counts_E, theirs_NE) -> the rows sent to each rank of the axis, and those received from each.
RowSizes = Callable[[Tensor, Tensor], list[list[int]]]


def make_dispatch(
    axis: Axis, row_multiple: int | None = None, sizes: RowSizes | None = None, *, overlap: bool = True
) -> ExpertDispatch:
    """The twin of modeling.moe.staying, for experts cut over ``axis`` in equal, consecutive parts.

    All ranks of the axis call it for the same layer, also with no tokens. Each pair's hidden state is sent to its
    expert's rank and its output back: 2 x top_k x d_model elements a token in each direction, less those that stay; and
    once the counts, 8 n_experts bytes. ``sizes`` tells the numbers of rows where no values are at hand (None: the
    counts'). ``overlap``: hidden states are still on their way when it returns, as their gradients are when the
    backward pass goes on with what was computed until the experts were.
    """

    def dispatch(hidden_TD: Tensor, indices_TK: Tensor, n_experts: int, fuse: Fuse) -> tuple[Tensor, ComputeExperts]:
        counts_E = count_pairs(indices_TK, n_experts)
        theirs_NE = exchange_counts(counts_E, axis)  # from each rank of the axis, for each of our experts
        sent, received = (sizes or sizes_on_host)(counts_E, theirs_NE)
        rows = place_rows(indices_TK, counts_E, 1)
        exchange = RowExchange(sent, received, axis, async_op=overlap)
        theirs_RD, dtype = exchange.begin(ToRows.apply(hidden_TD, rows, fuse)), hidden_TD.dtype
        blocks = place_blocks(theirs_NE, sum(received), row_multiple or row_multiple_of(theirs_RD.device))

        def compute(
            theirs_RD: Tensor,
            weights_TK: Tensor,
            gate_EFD: Tensor,
            up_EFD: Tensor,
            down_EDF: Tensor,
            biases: ExpertBiases | None,
            swiglu_limit: float | None,
            fuse: Fuse,
            products: Products,
        ) -> Tensor:
            experts = (gate_EFD, up_EFD, down_EDF, biases, swiglu_limit, fuse, products)
            out_RD = experts_over_rows(exchange.end(theirs_RD), blocks, None, *experts)
            back_RD = exchange_rows(out_RD, received, sent, axis)
            return WeightedSumRows.apply(back_RD, weights_TK.to(dtype), rows, fuse)

        return theirs_RD, compute

    return dispatch


def sizes_on_host(counts_E: Tensor, theirs_NE: Tensor) -> list[list[int]]:
    """The rows that this rank sends to each rank of the axis, and those that it receives from each.

    All-to-all is told them by the host, which waits here for the GPU: the one wait of a layer.
    """
    return torch.stack([counts_E.view(len(theirs_NE), -1).sum(1), theirs_NE.sum(1)]).tolist()


def exchange_counts(counts_E: Tensor, axis: Axis) -> Tensor:
    """counts_NE: how many rows each rank of the axis sends to each of our experts."""
    theirs = torch.empty_like(counts_E)
    dist.all_to_all_single(theirs, counts_E, group=axis.group)
    return theirs.view(axis.degree, -1)
