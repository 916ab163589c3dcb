"""Activation offloading: the tensors that a layer saves for its backward pass lie on the host until that pass.

torch's own ``save_on_cpu`` copies each saved tensor by itself and waits for it. Here a layer's tensors are copied
together, on a stream of their own: to page-locked host memory while the next layer computes, and back while the
backward pass of that next layer runs. This uses only hooks on saved tensors (``parallel.remake``), so the autograd
graph is unchanged and gradients are equal bit for bit.

On the device are, at any time, the saved tensors of the last layer and of the one that computes, in the backward pass
those that the next layer needs, and all that is not worth copying: weights, integers, small tensors, and what a
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

Mark = Any  # an event in a stream; None: nothing has to be waited for
Pairs = Sequence[tuple[Tensor, Tensor]]  # (target, source) of each copy


class Copies(Protocol):
    """How tensors are copied to the host and back beside the computation.

    The two directions do not wait for each other. Copies begin when all computation that was enqueued before them is
    done. The mark that is returned is their end.
    """

    def send(self, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        """Copies from the device to the host, once the marks of ``after`` have been passed too."""
        ...

    def fetch(self, pairs: Pairs) -> Mark:
        """Copies from the host to the device, after all computation that was enqueued before."""
        ...

    def wait(self, mark: Mark) -> None:
        """Makes computation that is enqueued from now on wait for the mark. The host does not wait."""
        ...

    def page(self, n_bytes: int) -> Tensor:
        """Newly allocated host memory of ``n_bytes`` bytes, as a flat uint8 tensor."""
        ...


class AtOnce:
    """Copies on a CPU, where device and host have the same memory: each copy is done when its call returns."""

    def send(self, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        """Copies all pairs, at once."""
        for target, source in pairs:
            target.copy_(source)

    def fetch(self, pairs: Pairs) -> Mark:
        """Copies all pairs, at once."""
        self.send(pairs, ())

    def wait(self, mark: Mark) -> None:
        """Returns at once, since each copy is done when its call returns."""

    def page(self, n_bytes: int) -> Tensor:
        """Newly allocated memory of ``n_bytes`` bytes, as a flat uint8 tensor."""
        return torch.empty(n_bytes, dtype=torch.uint8)


class OnStreams:
    """Copies on CUDA, by one stream for each direction, since a PCIe link carries both at once.

    Host memory is page-locked; else the host would wait for each copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.to_host, self.to_device = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def send(self, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        """Enqueues copies from the device to the host; returns the event of their end."""
        return self.copy(self.to_host, pairs, after)

    def fetch(self, pairs: Pairs) -> Mark:
        """Enqueues copies from the host to the device; returns the event of their end."""
        return self.copy(self.to_device, pairs, ())

    def copy(self, stream: torch.cuda.Stream, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        """Enqueues the copies on ``stream``, after the current stream and ``after``; returns the event of their end."""
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for mark in after:
            stream.wait_event(mark)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, mark: Mark) -> None:
        """Makes the current stream wait for the event."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    def page(self, n_bytes: int) -> Tensor:
        """Newly allocated page-locked host memory of ``n_bytes`` bytes, as a flat uint8 tensor."""
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)


def copies_for(device: torch.device) -> Copies:
    """The ``Copies`` for tensors of this device."""
    return OnStreams(device) if device.type == "cuda" else AtOnce()


class Page:
    """A piece of host memory, which may be written again once the mark ``read`` has been passed."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.read: Mark = None


class Pool:
    """Host pages of one size, which are reused and never freed: as many as were ever in use at once.

    Tensors of any size lie in them one after another, so that experts' rows, whose number varies, need no new memory.
    The size should be a power of two, since torch allocates page-locked memory in such sizes.
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
        """A page that is not in use; a new one is allocated if there is none."""
        if self.free:
            return self.free.pop()
        self.n_pages += 1
        return Page(self.copies.page(self.page_bytes))

    def give(self, pages: Sequence[Page], read: Mark) -> None:
        """Takes pages back, whose contents are still being read until the mark ``read`` is passed."""
        for page in pages:
            page.read = read if read is not None else page.read
        self.free.extend(pages)


class Block:
    """The memory of one or more saved tensors of a layer: on the device, or in pages of the host."""

    def __init__(self, slot: "Slot", flat: Tensor) -> None:
        self.slot = slot
        self.flat: Tensor | None = flat  # None: it is on the host alone
        self.shape, self.dtype, self.device = flat.shape, flat.dtype, flat.device
        self.on_host: list[Tensor] = []  # its bytes on the host, in order, as pieces of pages

    def restore(self) -> Tensor:
        """The block's whole memory, back on the device."""
        self.slot.turn()
        assert self.flat is not None
        return self.flat

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of the block's pieces: the bytes on the host, and the same bytes on the device."""
        assert self.flat is not None
        parts = self.flat.view(torch.uint8).split([len(each) for each in self.on_host])
        yield from zip(self.on_host, parts, strict=True)


class Slot:
    """The saved tensors of one layer for one micro-batch. It is freed with the last of them that autograd holds."""

    def __init__(self, offloader: "Offloader", layer: nn.Module, previous: "Slot | None") -> None:
        self.offloader, self.weights = offloader, tuple(layer.parameters())
        self.previous = None if previous is None else weakref.ref(previous)  # the slot whose backward pass comes next
        self.blocks: dict[tuple[int, torch.dtype], weakref.ref[Block]] = {}
        self.pages: list[Page] = []
        self.sent: Mark = None
        self.is_away = self.has_turned = False
        self.arriving: tuple[Mark, list[Tensor]] | None = None

    def keep(self, tensor: Tensor) -> Parked | HeldWeight | Tensor:
        """What autograd is to hold in place of a saved tensor: a view of a block or a weight, or the tensor itself."""
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
        """Starts copying to the host all blocks except those in the ``shared`` storages, which other layers use too."""
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
        """Frees the device's memory. Computation from now on, which may reuse that memory, waits for the copy."""
        self.offloader.copies.wait(self.sent)
        self.is_away = True
        for block in self.held():
            block.flat = None

    def fetch(self) -> None:
        """Starts copying the blocks back to the device, if ``leave`` has freed them there.

        The copies to the host are over then: computation has waited for them, and these copies wait for computation.
        """
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
        """Makes computation from now on wait for the copies that ``fetch`` started; their memory is held until then."""
        if self.arriving is not None:
            self.offloader.copies.wait(self.arriving[0])
            self.arriving = None

    def turn(self) -> None:
        """Called when the layer's backward pass begins: its tensors are back, and the previous layer's are fetched."""
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
        """Returns the pages to the pool; their contents are still being read until the mark ``read`` is passed."""
        self.offloader.pool.give(self.pages, read)
        self.pages = []

    def __del__(self) -> None:
        self.arrive()
        self.give_pages(None)


class Room:
    """Takes pages from a pool and fills one after another."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.pages: list[Page] = []
        self.used = pool.page_bytes  # of the last page

    def take(self, n_bytes: int) -> list[Tensor]:
        """Host memory of ``n_bytes`` bytes, as pieces that each lie within one page."""
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
    """Keeps the tensors that layers save on the host until their backward passes. One serves all layers of a rank.

    Each forward pass of a layer must run inside ``during``.
    """

    def __init__(self, copies: Copies, sizes: Sizes, *, stays: int | None = None) -> None:
        """``stays``: the number of a layer whose backward pass directly follows its forward pass; its tensors stay."""
        self.copies, self.least_bytes, self.stays = copies, sizes.least_offloaded_bytes, stays
        self.pool = Pool(copies, sizes.page_bytes)
        self.open: Slot | None = None  # of the layer that computes
        self.newest: Slot | None = None  # the slot that was sent last, which is still on the device too
        self.turns = 0  # the layers' backward passes since then
        self.last: tuple[int, weakref.ref[Context], weakref.ref[Slot]] | None = None

    @contextmanager
    def during(self, layer: DecoderLayer, context: Context) -> Iterator[None]:
        """While entered, tensors that the layer saves are collected; on leaving, they begin their copy to the host.

        The layer before that then frees its device memory. Nothing happens where gradients are disabled.
        """
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
        """What is to be held in place of a tensor until the backward pass of the layer that is in its forward pass."""
        return tensor.detach() if self.open is None else self.open.keep(tensor)

    def before(self, layer: int, context: Context) -> Slot | None:
        """The previous layer's slot of the same micro-batch, if that layer's forward pass was the last; else None."""
        if self.last is None:
            return None
        number, theirs, slot = self.last
        return slot() if number == layer - 1 and theirs() is context else None

    def let_newest_go(self) -> None:
        """Frees the device memory of the slot that was sent last."""
        newest, self.newest = self.newest, None
        if newest is not None:
            newest.leave()

    def forget_newest(self, turning: Slot) -> None:
        """Called when a layer's backward pass begins. At the second such call the slot that was sent last is freed.

        It is not freed at the first call, which would have to wait for its copy; nor if the backward pass is its own.
        """
        self.turns += 1
        if self.newest is turning:
            self.newest = None
        elif self.turns > 1:
            self.let_newest_go()

    def is_worth(self, tensor: Tensor, n_bytes: int) -> bool:
        """Whether a tensor in a storage of ``n_bytes`` is worth copying. Integers, few and used as indices, are not."""
        return n_bytes >= self.least_bytes and (tensor.is_floating_point() or tensor.dtype == torch.bool)


def offloader_of(model: Decoder, copies: Copies, sizes: Sizes) -> Offloader:
    """The offloader for the layers of ``model``, a rank's part of a decoder.

    Where the part has the head, the last layer's tensors stay on the device, since its backward pass follows at once.
    """
    stays = max(map(int, model.layers)) if model.head is not None else None
    return Offloader(copies, sizes, stays=stays)


def storages_in(thing: Any) -> Iterator[int]:
    """The storages (``storage_of``) of all tensors in a context, including those that it has cached."""
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
