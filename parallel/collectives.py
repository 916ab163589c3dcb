"""Collectives over one axis of the mesh, most of them differentiable by autograd.

Each docstring says what the ranks hold before and after, and the bytes that one rank sends. There n is the degree of
the axis and x the bytes of the larger of input and output; an axis of degree 1 sends nothing. All ranks of the axis
call each collective, in the same order. Shape letters: B batch, S sequence, D d_model, R rows.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from parallel.mesh import Axis


def gather_sequence(hidden_BSD: Tensor, axis: Axis) -> Tensor:
    """All positions, gathered from the ranks' parts (all-gather); the backward pass reduce-scatters the gradients.

    Before: (B, S/n, D), another part of the positions on each rank. After: (B, S, D), the same on all ranks. Bytes each
    way: x (n-1)/n.
    """
    return hidden_BSD if axis.degree == 1 else _GatherSequence.apply(hidden_BSD, axis)


def scatter_sum_sequence(partial_BSD: Tensor, axis: Axis) -> Tensor:
    """The sum over the ranks at this rank's part of the positions (reduce-scatter); the backward pass all-gathers.

    Before: (B, S, D), a summand on each rank. After: (B, S/n, D), the whole sum at another part of the positions on
    each rank. Bytes each way: x (n-1)/n.
    """
    return partial_BSD if axis.degree == 1 else _ScatterSumSequence.apply(partial_BSD, axis)


def sum_forward(values: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis (all-reduce), whose gradient is passed to each rank's summand as it is.

    Before: a summand on each rank. After: the same sum on all; all must compute the same from it. Bytes, forward alone:
    2 x (n-1)/n.
    """
    return values if axis.degree == 1 else _SumForward.apply(values, axis)


def sum_both_ways(values: Tensor, axis: Axis) -> Tensor:
    """The sum over the axis (all-reduce), where each rank computes something else from it; gradients are summed too.

    Before: a summand on each rank. After: the same sum on all; in the backward pass, the sum of all ranks' gradients.
    Bytes each way: 2 x (n-1)/n.
    """
    return values if axis.degree == 1 else _SumBothWays.apply(values, axis)


Watch = Callable[["RowExchange", Literal["begun", "waited for"]], None]


UnderWay = tuple[dist.Work | None, Tensor, Tensor]  # a collective that was started, its input, and its output's memory


class SequenceGather:
    """``gather_sequence`` in two calls; nodes made between them are differentiated during the reduce-scatter.

        gather = SequenceGather(axis)
        hidden_BSD = gather.begin(hidden_BSD)  # all positions
        ...                                    # nodes that have nothing to do with the hidden states
        hidden_BSD = gather.end(hidden_BSD)

    Autograd runs nodes that are ready in the opposite order of their making. So the backward pass starts the
    reduce-scatter at ``end``, runs the nodes made in between if they are ready, and waits at ``begin``. The forward
    pass gathers at ``begin``, and waits there. One object serves one forward pass, on an axis of degree 2 or more.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.under_way: UnderWay | None = None

    def begin(self, part_BSD: Tensor) -> Tensor:
        """All positions (B, S, D), gathered from the ranks' parts (B, S/n, D). Bytes each way: x (n-1)/n."""
        return _BeginGather.apply(part_BSD, self)

    def end(self, whole_BSD: Tensor) -> Tensor:
        """What ``begin`` returned, as a node whose backward pass starts the reduce-scatter of the gradient."""
        return _EndGather.apply(whole_BSD, self)

    def start(self, grad_BSD: Tensor) -> None:
        """Starts the reduce-scatter of a gradient (B, S, D), of which each rank holds a summand."""
        assert self.under_way is None, "a gradient begins its way twice"
        self.under_way = _begin_reduce_scatter(grad_BSD.contiguous(), self.axis, async_op=True)

    def wait(self) -> Tensor:
        """The summed gradient at this rank's positions (B, S/n, D). On NCCL the current stream waits, not the host."""
        assert self.under_way is not None, "a gradient ends its way before it has begun it"
        (work, _, result), self.under_way = self.under_way, None
        if work is not None:
            work.wait()
        return result


class RowExchange:
    """One all-to-all of rows in two calls, between which other work is done while the rows are on their way.

    Before: this rank holds ``sum(sent)`` rows, of which the first ``sent[0]`` go to the axis's rank 0, and so on.
    After: ``sum(received)`` rows, the first ``received[0]`` from rank 0, and so on. The same object sends rows in one
    pass and their gradients back in the other one. With ``async_op`` False, ``start`` waits at once. Input and output
    are held until ``wait``; on NCCL the current stream waits there, not the host. ``watch`` is called when an exchange
    has been started and when it is waited for. Bytes: those of the rows that leave this rank, each way.
    """

    def __init__(
        self,
        sent: list[int],
        received: list[int],
        axis: Axis,
        *,
        async_op: bool = True,
        watch: Watch | None = None,
    ) -> None:
        self.sent, self.received, self.axis, self.async_op = sent, received, axis, async_op
        self.watch: Watch = watch or (lambda exchange, moment: None)
        self.under_way: UnderWay | None = None

    def start(self, rows_RD: Tensor, result_RD: Tensor, *, back: bool = False) -> None:
        """Starts sending ``rows_RD``, to arrive in ``result_RD``, both contiguous. ``back``: the opposite direction."""
        assert self.under_way is None, "rows begin their way before others have ended theirs"
        sent, received = (self.received, self.sent) if back else (self.sent, self.received)
        work = dist.all_to_all_single(result_RD, rows_RD, received, sent, group=self.axis.group, async_op=self.async_op)
        self.under_way = work, rows_RD, result_RD
        if work is not None:
            self.watch(self, "begun")

    def wait(self) -> Tensor:
        """The received rows (R, D) of the exchange that ``start`` began; waits until they have arrived."""
        assert self.under_way is not None, "rows end their way before they have begun it"
        (work, _, result_RD), self.under_way = self.under_way, None
        if work is not None:
            self.watch(self, "waited for")
            work.wait()
        return result_RD


class RowExchanges:
    """Rows sent to other ranks in parts, one all-to-all for each, so that work on one part hides the others' transfer.

        there = RowExchanges(sent, received, axis)  # numbers of rows: of each part, and in it of each rank
        back = RowExchanges(received, sent, axis)
        rows_RD = there.begin(rows_RD)              # all parts are being sent; nobody may read them yet
        ...                                         # gradients travel while this is differentiated
        parts = [back.begin_part(work(there.end_part(rows_RD, part)), part) for part in range(n_parts)]
        rows_RD = back.end(parts)

    Sent and received rows both lie part by part, and within a part by rank. Autograd runs nodes that are ready in the
    opposite order of their making, so the backward pass is the mirror image: ``back.end`` starts sending the gradients
    of all parts, the last part first; ``begin_part`` waits for one part's; ``end_part`` starts sending them home; and
    ``there.begin`` waits for all of them. Gradients that autograd passes between these nodes meanwhile have the right
    shape and no values. Bytes: those of the rows that leave this rank, each way.
    """

    def __init__(
        self,
        sent: list[list[int]],
        received: list[list[int]],
        axis: Axis,
        *,
        async_op: bool = True,
        watch: Watch | None = None,
    ) -> None:
        sizes = zip(sent, received, strict=True)
        self.parts = [RowExchange(*each, axis, async_op=async_op, watch=watch) for each in sizes]
        self.n_sent, self.n_received = [sum(part) for part in sent], [sum(part) for part in received]
        self.joined: Tensor | None = None  # memory into which the parts that ``start_one`` sends arrive

    def begin(self, rows_RD: Tensor) -> Tensor:
        """Starts sending all parts; returns the buffer (R, D) into which the received rows of all parts will arrive."""
        return _BeginParts.apply(rows_RD, self)

    def end_part(self, rows_RD: Tensor, part: int) -> Tensor:
        """The received rows of one part (R, D), a view of what ``begin`` returned; waits until they have arrived."""
        return _EndPart.apply(rows_RD, self, part)

    def begin_part(self, rows_RD: Tensor, part: int) -> Tensor:
        """Starts sending one part; returns a placeholder tensor for it, which ``end`` takes."""
        return _BeginPart.apply(rows_RD, self, part)

    def end(self, parts: Sequence[Tensor]) -> Tensor:
        """The received rows of all parts (R, D); waits until they have arrived."""
        return _EndParts.apply(self, *parts)

    def start_all(self, rows_RD: Tensor, order: Sequence[int], *, back: bool) -> Tensor:
        """Starts sending all parts of ``rows_RD`` in ``order``; returns the buffer into which they will arrive."""
        n_given, n_found = (self.n_received, self.n_sent) if back else (self.n_sent, self.n_received)
        found_RD = rows_RD.new_empty(sum(n_found), *rows_RD.shape[1:])
        given, found = rows_RD.contiguous().split(n_given), found_RD.split(n_found)
        for part in order:
            self.parts[part].start(given[part], found[part], back=back)
        return found_RD

    def start_one(self, part: int, rows_RD: Tensor, *, back: bool) -> None:
        """Starts sending one part, to arrive at its place in the buffer of all parts."""
        n_found = self.n_sent if back else self.n_received
        if self.joined is None:
            self.joined = rows_RD.new_empty(sum(n_found), *rows_RD.shape[1:])
        self.parts[part].start(rows_RD.contiguous(), self.joined.split(n_found)[part], back=back)

    def wait_all(self) -> Tensor:
        """The received rows of all parts that ``start_one`` sent (R, D); waits until they have arrived."""
        for part in self.parts:
            part.wait()
        assert self.joined is not None
        joined, self.joined = self.joined, None
        return joined


@torch.no_grad()
def gather_parts(part: Tensor, dim: int, axis: Axis) -> Tensor:
    """The whole tensor of which each rank of the axis holds an equal part along ``dim``, in rank order (all-gather).

    Before: another part on each rank. After: the same whole on all. Not differentiable. Bytes: x (n-1)/n.
    """
    if axis.degree == 1:
        return part
    rows, *others = part.shape
    gathered = part.new_empty(axis.degree * rows, *others)
    dist.all_gather_into_tensor(gathered, part.contiguous(), group=axis.group)
    return gathered if dim == 0 else torch.cat(gathered.chunk(axis.degree), dim)


@torch.no_grad()
def exchange_elements(flat: Tensor, sent: list[int], received: list[int], axis: Axis) -> Tensor:
    """The elements that all ranks of the axis send to this one, in rank order (all-to-all). Not differentiable.

    Before: ``sum(sent)`` elements, of which the first ``sent[0]`` go to the axis's rank 0, and so on. After:
    ``sum(received)`` elements, the first ``received[0]`` from rank 0, and so on. Bytes: those of the elements that
    leave this rank.
    """
    if axis.degree == 1:
        return flat
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat, received, sent, group=axis.group)
    return result


@torch.no_grad()
def sum_together(tensors: Sequence[Tensor], axis: Axis, device: torch.device) -> None:
    """Replaces each tensor by its sum over the axis, in place, by one fp32 all-reduce of all of them on ``device``.

    Every rank of the axis calls it with tensors of the same shapes, in the same order; they may lie on another device.
    Before: a summand of each on each rank. After: the same sums on all. Bytes: 2 x (n-1)/n, x being that of fp32.
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
    return _begin_reduce_scatter(whole_BSD, axis, async_op=False)[2]


def _begin_reduce_scatter(whole_BSD: Tensor, axis: Axis, *, async_op: bool) -> UnderWay:
    batch, length, width = whole_BSD.shape
    part = length // axis.degree
    by_rank = whole_BSD.view(batch, axis.degree, part, width).transpose(0, 1).reshape(axis.degree * batch, part, width)
    given, result = by_rank.contiguous(), whole_BSD.new_empty(batch, part, width)
    return dist.reduce_scatter_tensor(result, given, group=axis.group, async_op=async_op), given, result


class _GatherSequence(Function):
    @staticmethod
    def forward(ctx, part_BSD: Tensor, axis: Axis) -> Tensor:  # type: ignore[override]
        ctx.axis = axis
        return _all_gather(part_BSD, axis)

    @staticmethod
    def backward(ctx, grad_BSD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _reduce_scatter(grad_BSD.contiguous(), ctx.axis), None


class _BeginGather(Function):
    @staticmethod
    def forward(ctx, part_BSD: Tensor, gather: SequenceGather) -> Tensor:  # type: ignore[override]
        ctx.halves = gather
        return _all_gather(part_BSD, gather.axis)

    @staticmethod
    def backward(ctx, grad_BSD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.halves.wait(), None


class _EndGather(Function):
    @staticmethod
    def forward(ctx, whole_BSD: Tensor, gather: SequenceGather) -> Tensor:  # type: ignore[override]
        ctx.halves = gather
        return whole_BSD.view_as(whole_BSD)

    @staticmethod
    def backward(ctx, grad_BSD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.halves.start(grad_BSD)
        return grad_BSD.new_empty(()).expand_as(grad_BSD), None  # of the shape that autograd expects, and no memory


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


class _BeginParts(Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, exchanges: RowExchanges) -> Tensor:  # type: ignore[override]
        ctx.exchanges = exchanges
        return exchanges.start_all(rows_RD, range(len(exchanges.parts)), back=False)

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.exchanges.wait_all(), None


class _EndPart(Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, exchanges: RowExchanges, part: int) -> Tensor:  # type: ignore[override]
        ctx.exchanges, ctx.part, ctx.shape = exchanges, part, rows_RD.shape
        exchanges.parts[part].wait()
        return rows_RD.narrow(0, sum(exchanges.n_received[:part]), exchanges.n_received[part])

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        ctx.exchanges.start_one(ctx.part, grad_RD, back=True)
        # One part's gradient of the right shape is enough for autograd.
        return valueless(grad_RD, ctx.shape) if ctx.part == 0 else None, None, None


class _BeginPart(Function):
    @staticmethod
    def forward(ctx, rows_RD: Tensor, exchanges: RowExchanges, part: int) -> Tensor:  # type: ignore[override]
        ctx.exchanges, ctx.part = exchanges, part
        exchanges.start_one(part, rows_RD, back=False)
        return valueless(rows_RD, (exchanges.n_received[part], *rows_RD.shape[1:]))

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.exchanges.parts[ctx.part].wait(), None, None


class _EndParts(Function):
    @staticmethod
    def forward(ctx, exchanges: RowExchanges, *parts: Tensor) -> Tensor:  # type: ignore[override]
        ctx.exchanges = exchanges
        return exchanges.wait_all()

    @staticmethod
    def backward(ctx, grad_RD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        exchanges = ctx.exchanges
        exchanges.start_all(grad_RD, range(len(exchanges.parts))[::-1], back=True)
        return None, *grad_RD.split(exchanges.n_received)


def valueless(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of the given shape with one element of memory and no meaningful values, which nobody may read."""
    return like.new_empty([1] * len(shape)).expand(shape)
