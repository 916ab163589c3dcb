"""Communications whose results arrive only when they are waited for, so that code that does not wait for them fails.

gloo's results may arrive long before the wait, and it may have read its inputs long before, so a race that NCCL's
streams would have is not seen there. Here an output is poison until the wait, and at the wait the input must be what it
was at the start, and the output still poison.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

POISON = -77  # of integers: no number of rows, no rank and no target
IN_PLACE = ("allreduce", "broadcast", "reduce")  # (group, tensors, ...)
BETWEEN = (  # (group, output, input, ...)
    "_allgather_base",
    "all_gather_single",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "alltoall_base",
    "all_to_all_single",
)


class Late:
    """A communication between its start and the wait for it. gloo works on copies of its inputs and outputs."""

    def __init__(self, kind: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], found: list[str]) -> None:
        self.kind, self.found, self.is_over = kind, found, False
        self.inputs = [(each, each.detach().clone()) for each in inputs]
        self.outputs = [(each, torch.empty_like(each, requires_grad=False)) for each in outputs]
        self.work: Any = None

    def begin(self, work: Any) -> "Late":
        """Takes gloo's own work, which was given the copies, and poisons the outputs."""
        self.work = work
        for output, _ in self.outputs:
            output.data.copy_(poison(output))
        return self

    def wait(self, *_: Any) -> bool:
        """Waits for gloo, and hands out the results. A second call does nothing."""
        if self.is_over:
            return True
        self.is_over = True
        self.work.wait()
        if not all(same(each, before) for each, before in self.inputs):
            self.found.append(f"{self.kind}: its input was written to before the wait")
        for output, arrived in self.outputs:
            if not same(output, poison(output)):
                self.found.append(f"{self.kind}: its output was written to before the wait")
            output.data.copy_(arrived)
        return True

    def is_completed(self) -> bool:
        """Whether gloo is done."""
        return self.work.is_completed()


def poison(like: Tensor) -> Tensor:
    """A tensor of the same shape that no result may contain."""
    return torch.full_like(like, float("nan") if like.is_floating_point() else POISON, requires_grad=False)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same numbers, NaN included."""
    return torch.equal(one.detach().nan_to_num(nan=3e4), other.nan_to_num(nan=3e4))


@contextlib.contextmanager
def late_collectives() -> Iterator[list[str]]:
    """A context in which results arrive at the wait; on leaving, the list that it gives has all faults."""
    found: list[str] = []
    begun: list[Late] = []

    def kept(late: Late) -> Late:
        begun[:] = [each for each in begun if not each.is_over]
        begun.append(late)
        return late

    def in_place(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any, tensors: Any, *rest: Any, **options: Any) -> Any:
            late = Late(kind, [], tensors, found)
            for whole, (_, copy) in zip(tensors, late.outputs, strict=True):
                copy.copy_(whole.detach())
            return kept(late.begin(original(group, [copy for _, copy in late.outputs], *rest, **options)))

        return run

    def between(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any, output: Tensor, given: Tensor, *rest: Any, **options: Any) -> Any:
            shares = output.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()  # a part of the output
            late = Late(kind, [] if shares else [given], [output], found)
            copy = given.detach().clone()
            return kept(late.begin(original(group, late.outputs[0][1], copy, *rest, **options)))

        return run

    def transfer(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(group: Any, tensors: Any, *rest: Any, **options: Any) -> Any:
            late = Late(kind, *((tensors, []) if kind == "send" else ([], tensors)), found)
            copies = [copy for _, copy in late.inputs or late.outputs]
            return kept(late.begin(original(group, copies, *rest, **options)))

        return run

    with contextlib.ExitStack() as stack:
        for kinds, wrap in ((IN_PLACE, in_place), (BETWEEN, between), (("send", "recv"), transfer)):
            for kind in kinds:
                if hasattr(dist.ProcessGroup, kind):
                    stack.callback(setattr, dist.ProcessGroup, kind, vars(dist.ProcessGroup)[kind])
                    setattr(dist.ProcessGroup, kind, wrap(kind, getattr(dist.ProcessGroup, kind)))
        yield found
    found += [f"{each.kind}: nobody waited for it" for each in begun if not each.is_over]
