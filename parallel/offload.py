"""Activations on the host: what a layer keeps for its backward pass leaves the device until that pass comes.

torch's own ``save_on_cpu`` copies each saved tensor for itself and waits for it. Here a layer's tensors go together, on
a stream of their own: while the layer after it computes they are copied into page-locked memory of the host, and they
come back while the backward pass of the layer after it runs. Only hooks on saved tensors do that (``parallel.remake``),
so the graph is the plain one and gradients are equal bit for bit.

On the device are, at any time, what one layer has just left, what the layer that computes leaves, in the backward pass
what the next one needs, and all that is not worth its way: weights, whole numbers, small tensors, and what a
micro-batch's layers share (rotations, masks). The host never waits for the device.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from modeling.context import Context
from modeling.decoder import Decoder, DecoderLayer
from parallel.remake import HeldWeight, Parked, View, held_weight, restored, storage_of
from parallel.sizes import Sizes

Mark = Any  # a point in a stream's order; None: nothing is to be waited for
Pairs = Sequence[tuple[Tensor, Tensor]]  # targets and sources of copies


class Copies(Protocol):
    """How tensors go to the host and back beside the computation. Each way has an order of its own.

    Copies begin when all that computation has been given so far is done. What is returned marks their end.
    """

    def send(self, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        """Copies from the device to the host, when the marks of ``after`` are passed, too."""
        ...

    def fetch(self, pairs: Pairs) -> Mark:
        """Copies from the host to the device."""
        ...

    def wait(self, mark: Mark) -> None:
        """Computation that is given from now on begins when the mark is passed. The host goes on at once."""
        ...

    def page(self, n_bytes: int) -> Tensor:
        """New memory of the host: bytes."""
        ...


class AtOnce:
    """On a CPU: device and host are the same memory, and a copy is done when its call returns."""

    def send(self, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        """As Copies."""
        for target, source in pairs:
            target.copy_(source)

    def fetch(self, pairs: Pairs) -> Mark:
        """As Copies."""
        self.send(pairs, ())

    def wait(self, mark: Mark) -> None:
        """Returns at once: each copy has ended when it returns."""

    def page(self, n_bytes: int) -> Tensor:
        """As Copies."""
        return torch.empty(n_bytes, dtype=torch.uint8)


class OnStreams:
    """On CUDA: two streams, for a PCIe link carries both ways at once; page-locked memory, else the host would wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        """As Copies."""
        return self.copy(self.to_host, pairs, after)

    def fetch(self, pairs: Pairs) -> Mark:
        """As Copies."""
        return self.copy(self.to_device, pairs, ())

    def copy(self, stream: torch.cuda.Stream, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        """Gives the copies to the stream."""
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for mark in after:
            stream.wait_event(mark)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, mark: Mark) -> None:
        """As Copies."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    def page(self, n_bytes: int) -> Tensor:
        """As Copies."""
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)


def copies_for(device: torch.device) -> Copies:
    """How tensors of the device are copied."""
    return OnStreams(device) if device.type == "cuda" else AtOnce()


class Page:
    """A piece of the host's memory; it may be written again when ``read`` is passed."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.read: Mark = None


class Pool:
    """Pages of one size, which are kept: as many as were ever in use at once.

    Tensors of any sizes lie in them one after another, so that experts' rows, whose number varies, need no new memory.
    The size is a power of two: torch takes page-locked memory in such.
    """

    def __init__(self, copies: Copies, page_bytes: int) -> None:
        self.copies, self.page_bytes = copies, page_bytes
        self.free: list[Page] = []
        self.n_pages = 0

    @property
    def n_bytes(self) -> int:
        """Bytes of all the pool's pages."""
        return self.n_pages * self.page_bytes

    def take(self) -> Page:
        """A page that nobody else has."""
        if self.free:
            return self.free.pop()
        self.n_pages += 1
        return Page(self.copies.page(self.page_bytes))

    def give(self, pages: Sequence[Page], read: Mark) -> None:
        """Takes pages back. They hold what is read until ``read`` is passed."""
        for page in pages:
            page.read = read if read is not None else page.read
        self.free.extend(pages)


class Block:
    """The memory of one or more saved tensors of a layer: on the device, or in pages of the host."""

    def __init__(self, slot: "Slot", flat: Tensor) -> None:
        self.slot = slot
        self.flat: Tensor | None = flat  # None: it is on the host alone
        self.shape, self.dtype, self.device = flat.shape, flat.dtype, flat.device
        self.on_host: list[Tensor] = []  # its bytes, in order

    def restore(self) -> Tensor:
        """The block's whole memory, back on the device."""
        self.slot.turn()
        assert self.flat is not None
        return self.flat

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Its bytes on the host, and the same ones on the device."""
        assert self.flat is not None
        parts = self.flat.view(torch.uint8).split([len(each) for each in self.on_host])
        yield from zip(self.on_host, parts, strict=True)


class Slot:
    """What one layer keeps of one micro-batch. It goes with the last tensor that autograd holds of it."""

    def __init__(self, offloader: "Offloader", layer: nn.Module, previous: "Slot | None") -> None:
        self.offloader, self.weights = offloader, tuple(layer.parameters())
        self.previous = None if previous is None else weakref.ref(previous)  # whose backward pass comes after
        self.blocks: dict[tuple[int, torch.dtype], weakref.ref[Block]] = {}
        self.pages: list[Page] = []
        self.sent: Mark = None
        self.is_away = self.has_turned = False
        self.arriving: tuple[Mark, list[Tensor]] | None = None

    def keep(self, tensor: Tensor) -> Parked | HeldWeight | Tensor:
        """What autograd is to hold instead of a tensor."""
        weight = held_weight(self.weights, tensor)
        if weight is not None:
            return weight
        tensor = tensor.detach()
        storage = tensor.untyped_storage()
        if not self.offloader.is_worth(tensor, storage.nbytes()):
            return tensor
        key = storage_of(tensor), tensor.dtype
        block = self.blocks[key]() if key in self.blocks else None
        if block is None:
            block = Block(self, tensor.as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0))
            self.blocks[key] = weakref.ref(block)
        return Parked(block, View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())))

    def held(self) -> list[Block]:
        """The blocks that autograd still holds."""
        return [block for each in self.blocks.values() if (block := each()) is not None]

    def send(self, shared: frozenset[int]) -> None:
        """Begins to copy to the host all but what lies in the ``shared`` storages, which stay for other layers."""
        self.blocks = {key: each for key, each in self.blocks.items() if key[0] not in shared}
        blocks = self.held()
        room = Room(self.offloader.pool)
        for block in blocks:
            assert block.flat is not None
            block.on_host = room.take(block.flat.nbytes)
        self.pages = room.pages
        after = [page.read for page in self.pages if page.read is not None]
        self.sent = self.offloader.copies.send([pair for block in blocks for pair in block.pieces()], after)

    def leave(self) -> None:
        """Lets go of the device's memory: what computes from now on, and may take it, comes after the copy."""
        self.offloader.copies.wait(self.sent)
        self.is_away = True
        for block in self.held():
            block.flat = None

    def fetch(self) -> None:
        """Begins to copy back to the device what has left it: computation has waited for its way to the host."""
        if not self.is_away:
            return
        self.is_away, blocks = False, self.held()
        for block in blocks:
            block.flat = torch.empty(block.shape, dtype=block.dtype, device=block.device)
        pairs = [(there, here) for block in blocks for here, there in block.pieces()]
        mark = self.offloader.copies.fetch(pairs)
        self.arriving = mark, [block.flat for block in blocks if block.flat is not None]
        self.give_pages(mark)

    def arrive(self) -> None:
        """Computation that is given from now on finds what was fetched. Until then its memory is held."""
        if self.arriving is not None:
            self.offloader.copies.wait(self.arriving[0])
            self.arriving = None

    def turn(self) -> None:
        """The layer's backward pass is here: its tensors have to be, and those of the layer before are sent for."""
        if self.has_turned:
            return
        self.has_turned = True
        self.offloader.forget_newest(self)
        self.fetch()
        self.arrive()
        previous = None if self.previous is None else self.previous()
        if previous is not None:
            previous.fetch()

    def give_pages(self, read: Mark) -> None:
        """Hands the pages back, which hold what is read until ``read`` is passed."""
        self.offloader.pool.give(self.pages, read)
        self.pages = []

    def __del__(self) -> None:
        self.arrive()
        self.give_pages(None)


class Room:
    """Pages that are filled one after another."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.pages: list[Page] = []
        self.used = pool.page_bytes  # of the last page

    def take(self, n_bytes: int) -> list[Tensor]:
        """Memory of ``n_bytes`` bytes, in pieces that lie in one page each."""
        found = []
        while n_bytes:
            if self.used == self.pool.page_bytes:
                self.pages.append(self.pool.take())
                self.used = 0
            part = min(n_bytes, self.pool.page_bytes - self.used)
            found.append(self.pages[-1].memory.narrow(0, self.used, part))
            self.used, n_bytes = self.used + part, n_bytes - part
        return found


class Offloader:
    """Keeps what layers save on the host between their passes. One for all layers of a rank.

    Each forward pass of a layer is to run within ``during``.
    """

    def __init__(self, copies: Copies, sizes: Sizes, *, stays: int | None = None) -> None:
        """``stays``: the number of the layer whose backward pass follows its forward pass, which leaves nothing."""
        self.copies, self.least_bytes, self.stays = copies, sizes.least_offloaded_bytes, stays
        self.pool = Pool(copies, sizes.page_bytes)
        self.open: Slot | None = None  # of the layer that computes
        self.newest: Slot | None = None  # the one that was sent last, which is still on the device, too
        self.turns = 0  # backward passes of layers since it was sent
        self.last: tuple[int, weakref.ref[Context], weakref.ref[Slot]] | None = None

    @contextmanager
    def during(self, layer: DecoderLayer, context: Context) -> Iterator[None]:
        """While it lasts, what the layer's forward pass saves goes to the host."""
        if not torch.is_grad_enabled():
            yield
            return
        slot = self.open = Slot(self, layer, self.before(layer.layer, context))
        try:
            with saved_tensors_hooks(slot.keep, restored):
                yield
        finally:
            self.open = None
        self.last = layer.layer, weakref.ref(context), weakref.ref(slot)
        self.let_newest_go()
        if layer.layer != self.stays:
            slot.send(frozenset(storages_in(context)))
            self.newest, self.turns = slot, 0

    def keep(self, tensor: Tensor) -> Parked | HeldWeight | Tensor:
        """What is to be held, instead of a tensor, until the backward pass of the layer that computes."""
        return tensor.detach() if self.open is None else self.open.keep(tensor)

    def before(self, layer: int, context: Context) -> Slot | None:
        """The slot of the layer before this one, of the same micro-batch, where its forward pass was the last one."""
        if self.last is None:
            return None
        number, theirs, slot = self.last
        return slot() if number == layer - 1 and theirs() is context else None

    def let_newest_go(self) -> None:
        """What was sent last leaves the device."""
        newest, self.newest = self.newest, None
        if newest is not None:
            newest.leave()

    def forget_newest(self, turning: Slot) -> None:
        """A layer's backward pass has come. What was sent last leaves the device with the second one, if not its own.

        Not with the first one, which would have to wait for the copy.
        """
        self.turns += 1
        if self.newest is turning:
            self.newest = None
        elif self.turns > 1:
            self.let_newest_go()

    def is_worth(self, tensor: Tensor, n_bytes: int) -> bool:
        """Whether a tensor in a storage of so many bytes is worth its way. Whole numbers are few, and index others."""
        return n_bytes >= self.least_bytes and (tensor.is_floating_point() or tensor.dtype == torch.bool)


def offloader_of(model: Decoder, copies: Copies, sizes: Sizes) -> Offloader:
    """For the layers of a part of a decoder. Before the head the backward pass of the last one follows at once."""
    stays = max(map(int, model.layers)) if model.head is not None else None
    return Offloader(copies, sizes, stays=stays)


def storages_in(thing: Any) -> Iterator[int]:
    """The storages of all tensors in a context, with what it has cached."""
    if isinstance(thing, Tensor):
        yield storage_of(thing)
    elif isinstance(thing, dict):
        for each in thing.values():
            yield from storages_in(each)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from storages_in(each)
    elif is_dataclass(thing) and not isinstance(thing, type):
        yield from storages_in(vars(thing))
