"""Expert parallelism: tokens travel to the ranks that hold their experts, and back. Dropless.

Shape letters: T tokens, K top_k, R rows (token-expert pairs), E experts, D d_model, F d_ff.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from modeling.kernels.experts import (
    ExpertBiases,
    SumRows,
    ToRows,
    WeightsToRows,
    count_pairs,
    experts_grouped,
    place_rows,
)
from modeling.kernels.fuse import Fuse, plainly
from modeling.moe import ExpertDispatch
from parallel.collectives import exchange_rows
from parallel.mesh import Axis

# (counts_E, theirs_NE) -> the rows sent to each rank of the axis, and those received from each.
RowSizes = Callable[[Tensor, Tensor], list[list[int]]]


def make_dispatch(
    axis: Axis, row_multiple: int | None = None, sizes: RowSizes | None = None, fuse: Fuse = plainly
) -> ExpertDispatch:
    """The twin of modeling.kernels.experts.experts_grouped, for experts cut over ``axis`` in equal, consecutive parts.

    All ranks of the axis call it for the same layer, also with no tokens. Each pair's hidden state is sent to its
    expert's
    rank and its output back: 2 x top_k x d_model elements a token in each direction, less those that stay; and once
    the counts, 8 n_experts bytes. ``sizes`` tells the numbers of rows where no values are at hand (None: the counts').
    """

    def dispatch(
        hidden_TD: Tensor,
        indices_TK: Tensor,
        weights_TK: Tensor,
        gate_EFD: Tensor,
        up_EFD: Tensor,
        down_EDF: Tensor,
        biases: ExpertBiases | None = None,
        swiglu_limit: float | None = None,
    ) -> Tensor:
        n_local = gate_EFD.shape[0]
        counts_E = count_pairs(indices_TK, n_local * axis.degree)
        theirs_NE = exchange_counts(counts_E, axis)  # from each rank of the axis, for each of our experts
        sent, received = (sizes or sizes_on_host)(counts_E, theirs_NE)
        rows = place_rows(indices_TK, counts_E, 1)
        rows_RD = exchange_rows(ToRows.apply(hidden_TD, rows, fuse), sent, received, axis)
        experts_R = (
            torch.arange(n_local, device=rows_RD.device)
            .repeat(axis.degree)
            .repeat_interleave(theirs_NE.flatten(), output_size=sum(received))
        )
        experts = (gate_EFD, up_EFD, down_EDF, biases, swiglu_limit, row_multiple, fuse)
        out_RD = experts_grouped(rows_RD, experts_R[:, None], None, *experts)
        weights_R1 = WeightsToRows.apply(weights_TK.to(hidden_TD.dtype), rows)
        return SumRows.apply(exchange_rows(out_RD, received, sent, axis) * weights_R1, rows, fuse)

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
