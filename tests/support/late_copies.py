"""Copies to the host and back that are made as late as possible, so that code that does not wait for them fails.

On a CPU a copy is done when its call returns, so nothing could be read too early. Here each direction has a queue, and
a copy is made only when computation waits for its mark, or when a copy that has to come after it is made. It then reads
what a GPU might find: where nothing refers to the source any more, its memory may have been reused.
"""

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel.offload import Mark, Pairs

POISON = 0x7F  # the bytes of a large number in fp32 and bf16


@dataclass
class Late:
    """The interface of parallel.offload.Copies over CPU tensors, with late copies.

    ``n_late`` counts copies that were made at a wait; where it is 0, a test has tested nothing.
    """

    queues: dict[str, list[Callable[[], None]]] = field(default_factory=lambda: {"send": [], "fetch": []})
    done: dict[str, int] = field(default_factory=lambda: {"send": 0, "fetch": 0})
    n_late: int = 0
    waits: Collection[str] = ("send", "fetch")  # without one of these, computation does not wait for it: a fault
    orders: bool = True  # False is a fault: a page is overwritten before its contents have been fetched

    def send(self, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        return self.give("send", pairs, after)

    def fetch(self, pairs: Pairs) -> Mark:
        for target, _ in pairs:
            poison(target)
        return self.give("fetch", pairs, ())

    def give(self, way: str, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        """Queues the copies and returns their mark; device memory is not kept alive for them."""
        held = [(view_of(target, way == "fetch"), view_of(source, way == "send")) for target, source in pairs]

        def copy() -> None:
            for mark in after if self.orders else ():
                self.run(mark)
            for target, source in held:
                into, what = target(), source()
                if into is not None:
                    into.copy_(what) if what is not None else poison(into)

        self.queues[way].append(copy)
        return way, self.done[way] + len(self.queues[way])

    def run(self, mark: Mark) -> None:
        """Makes all queued copies up to the mark."""
        way, end = mark
        while self.done[way] < end:
            copy = self.queues[way].pop(0)
            self.done[way] += 1
            copy()
            self.n_late += 1

    def wait(self, mark: Mark) -> None:
        if mark[0] in self.waits:
            self.run(mark)

    def page(self, n_bytes: int) -> Tensor:
        memory = torch.empty(n_bytes, dtype=torch.uint8)
        poison(memory)
        return memory


def poison(tensor: Tensor) -> None:
    """Fills the tensor's memory with large numbers, which no result may contain."""
    tensor.view(torch.uint8).fill_(POISON)


def view_of(tensor: Tensor, on_device: bool) -> Callable[[], Tensor | None]:
    """A function that returns the tensor, or None once nothing else refers to its memory on the device.

    Tensors on the host (not ``on_device``) are always returned.
    """
    if not on_device:
        return lambda: tensor
    storage, dtype = tensor.untyped_storage(), tensor.dtype
    reference = weakref.ref(storage)
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def found() -> Tensor | None:
        there = reference()
        if there is None:
            return None
        return torch.empty(0, dtype=dtype).set_(there, offset, shape, stride)

    del storage
    return found
