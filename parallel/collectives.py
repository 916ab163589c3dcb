"""Collectives, most of them differentiated by autograd: what ranks hold before and after, and the bytes a rank sends.

n is the degree of the axis and x the bytes of the larger of input and output; an axis of degree 1 sends nothing.
Shape letters: B batch, S sequence, D d_model, R rows.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from parallel.mesh import Axis


def gather_sequence(hidden_BSD: Tensor, axis: Axis) -> Tensor:
    """From this rank's part of the positions to all of them. Backward: gradients summed and cut (reduce-scatter).

    Before: (B, S/n, D), another part on each rank. After: (B, S, D), the same on all. Bytes each way: x (n-1)/n.
    """
    return hidden_BSD if axis.degree == 1 else _GatherSequence.apply(hidden_BSD, axis)


def scatter_sum_sequence(partial_BSD: Tensor, axis: Axis) -> Tensor:
    """From partial sums over all positions to the whole sums of this rank's part. Backward gathers.

    Before: (B, S, D), a summand on each rank. After: (B, S/n, D). Bytes each way: x (n-1)/n.
    """
    return partial_BSD if axis.degree == 1 else _ScatterSumSequence.apply(partial_BSD, axis)


def sum_forward(values: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis; each rank's gradient is that of its own summand. Bytes, forward only: 2 x (n-1)/n."""
    return values if axis.degree == 1 else _SumForward.apply(values, axis)


def sum_both_ways(values: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis, of which each rank goes on with another function; so the gradients are summed too.

    Bytes each way: 2 x (n-1)/n.
    """
    return values if axis.degree == 1 else _SumBothWays.apply(values, axis)


def exchange_rows(rows_RD: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    """All-to-all of rows: the first ``sent[0]`` go to the axis's rank 0, and so on; ``received`` says what comes.

    Backward reverses. Bytes: those of the rows that leave this rank, each way.
    """
    return rows_RD if axis.degree == 1 else _ExchangeRows.apply(rows_RD, sent, received, axis)


class RowExchange:
    """``exchange_rows`` in two calls, between which other work is done while the rows are on their way.

        exchange = RowExchange(sent, received, axis)
        rows_RD = exchange.begin(rows_RD)  # nobody may read them yet
        ...                                # in the backward pass, gradients travel while this is differentiated
        rows_RD = exchange.end(rows_RD)

    Autograd goes through nodes that are ready in the opposite order of their making, so the backward pass begins the
    way back at ``end``, goes on with what lies between, and waits at ``begin``. ``async_op`` false: both passes wait at
    once. What travels is held until then; on NCCL a wait is one of the current stream, not of the host.
    """

    def __init__(self, sent: list[int], received: list[int], axis: Axis, *, async_op: bool = True) -> None:
        self.sent, self.received, self.axis, self.async_op = sent, received, axis, async_op
        self.under_way: tuple[dist.Work | None, Tensor, Tensor] | None = None

    def begin(self, rows_RD: Tensor) -> Tensor:
        """Memory into which the rows will come."""
        return rows_RD if self.axis.degree == 1 else _BeginExchange.apply(rows_RD, self)

    def end(self, rows_RD: Tensor) -> Tensor:
        """What ``begin`` gave, once the rows are there."""
        return rows_RD if self.axis.degree == 1 else _EndExchange.apply(rows_RD, self)

    def start(self, rows_RD: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Begins one way of the two, and gives the memory into which the rows will come."""
        assert self.under_way is None, "rows begin their way before others have ended theirs"
        given = rows_RD.contiguous()
        result = given.new_empty(sum(received), *given.shape[1:])
        work = dist.all_to_all_single(result, given, received, sent, group=self.axis.group, async_op=self.async_op)
        self.under_way = work, given, result
        return result

    def wait(self) -> Tensor:
        """Ends the way that was begun last, and gives the rows."""
        assert self.under_way is not None, "rows end their way before they have begun it"
        (work, _, result), self.under_way = self.under_way, None
        if work is not None:
            work.wait()
        return result


@torch.no_grad()
def gather_parts(part: Tensor, dim: int, axis: Axis) -> Tensor:
    """The whole tensor of which each rank of the axis holds an equal part along ``dim``, in their order.

    Before: another part on each rank. After: the same whole on all. Bytes: x (n-1)/n.
    """
    if axis.degree == 1:
        return part
    rows, *others = part.shape
    gathered = part.new_empty(axis.degree * rows, *others)
    dist.all_gather_into_tensor(gathered, part.contiguous(), group=axis.group)
    return gathered if dim == 0 else torch.cat(gathered.chunk(axis.degree), dim)


@torch.no_grad()
def exchange_elements(flat: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    """All-to-all of elements: the first ``sent[0]`` go to the axis's rank 0, and so on; ``received`` says what comes.

    Bytes: those of the elements that leave this rank.
    """
    if axis.degree == 1:
        return flat
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat, received, sent, group=axis.group)
    return result


@torch.no_grad()
def sum_together(tensors: Sequence[Tensor], axis: Axis, device: torch.device) -> None:
    """Replaces each tensor by its sum over the axis, in place; added up in fp32, by one collective for all of them.

    ``device`` is the axis's, on which they are added up, wherever they lie.

    Every rank of the axis calls it with tensors of the same shapes, in the same order. Bytes: 2 x (n-1)/n, x in fp32.
    """
    if axis.degree == 1 or not tensors:
        return
    total = torch.cat([tensor.reshape(-1).float() for tensor in tensors]).to(device)
    dist.all_reduce(total, group=axis.group)
    for tensor, part in zip(tensors, total.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def _all_gather(part_BSD: Tensor, axis: Axis) -> Tensor:
    batch, part, width = part_BSD.shape
    gathered = part_BSD.new_empty(axis.degree * batch, part, width)
    dist.all_gather_into_tensor(gathered, part_BSD.contiguous(), group=axis.group)
    return gathered.view(axis.degree, batch, part, width).transpose(0, 1).reshape(batch, -1, width)


def _reduce_scatter(whole_BSD: Tensor, axis: Axis) -> Tensor:
    batch, length, width = whole_BSD.shape
    part = length // axis.degree
    by_rank = whole_BSD.view(batch, axis.degree, part, width).transpose(0, 1).reshape(axis.degree * batch, part, width)
    result = whole_BSD.new_empty(batch, part, width)
    dist.reduce_scatter_tensor(result, by_rank.contiguous(), group=axis.group)
    return result


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx, part_BSD: Tensor, axis: Axis) -> Tensor:  # type: ignore[override]
        ctx.axis = axis
        return _all_gather(part_BSD, axis)

    @staticmethod
    def backward(ctx, grad_BSD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _reduce_scatter(grad_BSD.contiguous(), ctx.axis), None


class _ScatterSumSequence(Function):
    @staticmethod
    def forward(ctx, partial_BSD: Tensor, axis: Axis) -> Tensor:  # type: ignore[override]
        ctx.axis = axis
        return _reduce_scatter(partial_BSD.contiguous(), axis)

    @staticmethod
    def backward(ctx, grad_BSD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _all_gather(grad_BSD, ctx.axis), None


class _SumForward(Function):
    @staticmethod
    def forward(ctx, values: Tensor, axis: Axis) -> Tensor:  # type: ignore[override]
        total = values.clone()
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _SumBothWays(Function):
    @staticmethod
    def forward(ctx, values: Tensor, axis: Axis) -> Tensor:  # type: ignore[override]
        ctx.axis = axis
        total = values.clone()
        dist.all_reduce(total, group=axis.group)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.clone()
        dist.all_reduce(total, group=ctx.axis.group)
        return total, None


class _ExchangeRows(Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:  # type: ignore[override]
        ctx.sent, ctx.received, ctx.axis = sent, received, axis
        return _all_to_all(rows_RD, sent, received, axis)

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _all_to_all(grad_RD, ctx.received, ctx.sent, ctx.axis), None, None, None


class _BeginExchange(Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, exchange: RowExchange) -> Tensor:  # type: ignore[override]
        ctx.exchange = exchange
        return exchange.start(rows_RD, exchange.sent, exchange.received)

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.exchange.wait(), None


class _EndExchange(Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, exchange: RowExchange) -> Tensor:  # type: ignore[override]
        ctx.exchange = exchange
        exchange.wait()
        return rows_RD.view_as(rows_RD)

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.exchange.start(grad_RD, ctx.exchange.received, ctx.exchange.sent)
        return grad_RD, None  # of the shape that autograd expects; what came of it is not there yet


def _all_to_all(rows_RD: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    result = rows_RD.new_empty(sum(received), *rows_RD.shape[1:])
    dist.all_to_all_single(result, rows_RD.contiguous(), received, sent, group=axis.group)
    return result
