"""Expert parallelism: tokens are sent to the ranks that hold their experts, and the outputs back. No token is dropped.

A rank's experts may be cut into chunks, so that the rows of one chunk travel while another's are multiplied (pipelined
all-to-all: Tutel, arXiv:2206.03382, section 3.3; FasterMoE, He et al. 2022, PPoPP). Both papers cut the tokens; here
the experts are cut, so each expert's rows stay one product, and every gradient is the same sum, bit for bit.

Shape letters: T tokens, K top_k, R rows (token-expert pairs), E experts, D d_model, F d_ff, N ranks of the axis, C
chunks.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from modeling.kernels.expert_turns import Rows
from modeling.kernels.experts import (
    ExpertBiases,
    ToRows,
    Ways,
    WeightedSumRows,
    experts_over_rows,
    place_blocks,
    place_rows,
    row_multiple_of,
)
from modeling.kernels.fuse import Fuse
from modeling.moe import ComputeExperts, ExpertDispatch
from parallel.collectives import RowExchanges, Watch
from parallel.mesh import Axis

# (counts_E, theirs_NE, experts of a rank in each chunk) -> for each chunk the number of rows sent to each rank of the
# axis; and the number received from each.
RowSizes = Callable[[Tensor, Tensor, list[int]], list[list[list[int]]]]


def make_dispatch(
    axis: Axis,
    row_multiple: int | None = None,
    sizes: RowSizes | None = None,
    *,
    overlap: bool = True,
    chunks: int = 1,
    watch: Watch | None = None,
) -> ExpertDispatch:
    """A dispatch of tokens to experts that are cut over ``axis`` in equal, consecutive parts.

    It has the signature of the one-device dispatch, modeling.moe.staying. All ranks of the axis call the dispatch for
    the same layer, also with no tokens. Before: each rank holds the hidden states (T, D) of its own tokens. After: the
    rows of its own experts from all ranks, and, once these are computed and sent back, each of its tokens' weighted sum
    (T, D). Each token-expert pair's hidden state is sent to its expert's rank and its output back: 2 x top_k x d_model
    elements a token, in the forward and in the backward pass, less the pairs that stay; and once the counts, 8
    n_experts bytes. ``sizes`` returns the numbers of rows to send and to receive where the counts have no values, as in
    estimates; None: read from the counts. ``overlap``: the dispatch returns while hidden states are on their way; the
    backward pass likewise goes on while their gradients are. ``chunks``: the number of parts into which a rank's
    experts are cut, at most one for each expert; all are sent at once, and each comes back while later ones are
    multiplied. ``watch``: called when an exchange of rows has been started, and when it is waited for.
    """

    def dispatch(hidden_TD: Tensor, indices_TK: Tensor, counts_E: Tensor, fuse: Fuse) -> tuple[Tensor, ComputeExperts]:
        parts = chunks_of(len(counts_E) // axis.degree, chunks)
        theirs_NE = exchange_counts(counts_E, axis)  # from each rank of the axis, for each expert of this rank
        sent, received = (sizes or sizes_on_host)(counts_E, theirs_NE, parts)
        rows = rows_by_chunk(indices_TK, counts_E, axis.degree, parts)
        there = RowExchanges(sent, received, axis, async_op=overlap, watch=watch)
        back = RowExchanges(received, sent, axis, async_op=overlap, watch=watch)
        theirs_RD, dtype = there.begin(ToRows.apply(hidden_TD, rows, fuse)), hidden_TD.dtype
        multiple = row_multiple or row_multiple_of(theirs_RD, indices_TK.numel() * axis.degree // len(counts_E))
        came = zip(theirs_NE.split(parts, 1), received, strict=True)
        blocks = [place_blocks(counts_NE, sum(ranks), multiple) for counts_NE, ranks in came]

        def compute(
            theirs_RD: Tensor,
            weights_TK: Tensor,
            gate_EFD: Tensor,
            up_EFD: Tensor,
            down_EDF: Tensor,
            biases: ExpertBiases | None,
            swiglu_limit: float | None,
            ways: Ways,
        ) -> Tensor:
            given = [WeightChunks(each, parts) for each in (gate_EFD, up_EFD, down_EDF, *(biases or ()))]
            coming = []
            for chunk, placed in enumerate(blocks):
                gate, up, down, *added = (each.take(chunk) for each in given)
                experts = (gate, up, down, ExpertBiases(*added) if added else None, swiglu_limit, ways)
                out_RD = experts_over_rows(there.end_part(theirs_RD, chunk), placed, None, *experts)
                coming.append(back.begin_part(out_RD, chunk))
            return WeightedSumRows.apply(back.end(coming), weights_TK.to(dtype), rows, ways.fuse)

        return theirs_RD, compute

    return dispatch


def chunks_of(n_experts: int, chunks: int) -> list[int]:
    """The number of a rank's experts in each chunk; the numbers differ by one at most, with the larger ones first."""
    return [n_experts // chunks + (chunk < n_experts % chunks) for chunk in range(chunks)]


def sizes_on_host(counts_E: Tensor, theirs_NE: Tensor, parts: list[int]) -> list[list[list[int]]]:
    """The numbers of rows of each chunk that this rank sends to each rank of the axis, and receives from each.

    The all-to-all needs them on the host, which waits here for the GPU: the only such wait of a layer.
    """
    both_2NE = torch.stack([counts_E.view_as(theirs_NE), theirs_NE])
    return torch.stack([part.sum(2) for part in both_2NE.split(parts, 2)], 1).tolist()


def exchange_counts(counts_E: Tensor, axis: Axis) -> Tensor:
    """The number of rows that each rank of the axis sends to each of this rank's experts (N, E/N), by an all-to-all.

    Before: ``counts_E``, the numbers of rows that this rank sends to all experts. All ranks of the axis call it. Bytes:
    8 E (N-1)/N.
    """
    theirs = torch.empty_like(counts_E)
    dist.all_to_all_single(theirs, counts_E, group=axis.group)
    return theirs.view(axis.degree, -1)


def rows_by_chunk(indices_TK: Tensor, counts_E: Tensor, n_ranks: int, parts: list[int]) -> Rows:
    """The order of the rows that this rank sends: by chunk, within a chunk by rank, and within a rank by expert."""
    if len(parts) == 1:
        return place_rows(indices_TK, counts_E, 1)
    numbers_E = torch.arange(len(counts_E), device=counts_E.device)
    order_E = torch.cat([part_NX.flatten() for part_NX in numbers_E.view(n_ranks, -1).split(parts, 1)])
    places_E = torch.empty_like(order_E).index_copy_(0, order_E, numbers_E)
    return place_rows(places_E[indices_TK], counts_E[order_E], 1)


class WeightChunks:
    """The stacked weights of a rank's experts, chunk by chunk; all chunks' gradients are written into one tensor.

    With plain slices each chunk's gradient would be of the whole's size, filled up with zeros, and autograd would add
    them all; with ``split`` the gradient would be in memory twice.
    """

    def __init__(self, weight_EX: Tensor, parts: Sequence[int]) -> None:
        self.weight_EX, self.parts = weight_EX, parts
        self.grad_EX: Tensor | None = None
        self.n_missing = 0

    def take(self, chunk: int) -> Tensor:
        """The weights of one chunk's experts, differentiable."""
        return self.weight_EX if len(self.parts) == 1 else _TakeChunk.apply(self.weight_EX, self, chunk)

    def add(self, chunk: int, grad: Tensor) -> Tensor | None:
        """Stores one chunk's gradient; returns the whole gradient with the last chunk that was missing, else None."""
        if self.grad_EX is None:
            self.grad_EX, self.n_missing = grad.new_empty(sum(self.parts), *grad.shape[1:]), len(self.parts)
        self.grad_EX.split(self.parts)[chunk].copy_(grad)
        self.n_missing -= 1
        if self.n_missing:
            return None
        whole_EX, self.grad_EX = self.grad_EX, None
        return whole_EX


class _TakeChunk(Function):
    @staticmethod
    def forward(ctx, weight_EX: Tensor, chunks: WeightChunks, chunk: int) -> Tensor:  # type: ignore[override]
        ctx.add, ctx.chunk = chunks.add, chunk
        return weight_EX.narrow(0, sum(chunks.parts[:chunk]), chunks.parts[chunk])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        return ctx.add(ctx.chunk, grad), None, None
