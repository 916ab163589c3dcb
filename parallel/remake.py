"""Activation recomputation by saved-tensor hooks: tensors saved for the backward pass are dropped and made again.

``remade`` drops all that a function saves, and runs the function again when the backward pass needs it. ``Remaker``
does so for single chains of elementwise work between matrix products: the input of a product is made again by the chain
before it, and the product itself is not computed again. Both use hooks on saved tensors alone, so the autograd graph is
unchanged: gradients are the same bit for bit, also where a backward pass comes in several parts.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from modeling.kernels.fuse import Fuse, is_linear


class _Enough(Exception):
    """Ends a second run: every tensor that the backward pass needs has been made."""


class View(NamedTuple):
    """The shape, strides and offset of a tensor within another one that holds its memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # in elements, from the other tensor's first

    def of(self, base: Tensor) -> Tensor:
        """The tensor of this shape, stride and offset in the memory of ``base``."""
        if self == (base.shape, base.stride(), 0):
            return base
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)


def view_within(tensor: Tensor, base: Tensor) -> View | None:
    """``tensor`` as a view of ``base``; None where it does not lie wholly within ``base``'s memory."""
    return view_of_shared(tensor, base) if storage_of(tensor) == storage_of(base) else None


def view_of_shared(tensor: Tensor, base: Tensor) -> View | None:
    """The same for tensors that share a storage. Called for most tensors that a layer saves: mostly for equal views."""
    shape, stride = tensor.shape, tensor.stride()
    offset = int(tensor.storage_offset()) - int(base.storage_offset())
    is_same = offset == 0 and shape == base.shape and stride == base.stride()
    if not is_same and (offset < 0 or offset + extent(tensor) > extent(base)):
        return None
    return View(tuple(shape), stride, offset)


def extent(tensor: Tensor) -> int:
    """The number of storage elements from a tensor's first element to its last, both counted."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


class Place:
    """What autograd holds in place of a dropped tensor. When autograd releases it, the remade tensor is freed too."""

    def __init__(self, call: "Call") -> None:
        self.call = call
        self.value: Tensor | None = None

    def restore(self) -> Tensor:
        """The tensor; the function is run again if it has not been made yet."""
        if self.value is None:
            self.call.make()
        assert self.value is not None
        return self.value


class HeldWeight(NamedTuple):
    """A view of a weight, whose memory may be freed and gathered anew between the passes (ZeRO 3)."""

    weight: nn.Parameter
    view: View
    version: int  # torch's count of in-place writes to the weight, when the view was saved

    def restore(self) -> Tensor:
        """The view of the weight's present memory. Fails, as autograd's own check would, if it was written to."""
        assert self.weight._version == self.version, "a weight was written to between a forward and its backward pass"
        return self.view.of(self.weight.detach())


class Restorable(Protocol):
    """Memory whose contents may be elsewhere, such as on the host, until they are asked for."""

    def restore(self) -> Tensor:
        """The whole memory, as one tensor on the device."""
        ...


class Parked(NamedTuple):
    """A saved tensor as a view of memory that may be on the host until the backward pass."""

    memory: Restorable
    view: View

    def restore(self) -> Tensor:
        """The tensor, on the device."""
        return self.view.of(self.memory.restore())

    def part(self, view: View) -> "Parked":
        """A view of the parked tensor, parked as well."""
        return Parked(self.memory, view._replace(offset=self.view.offset + view.offset))


Keep = Callable[[Tensor], Any]  # a tensor -> what is held of it until the backward pass, where ``restored`` takes it


PACKED = (Place, HeldWeight, Parked)
HELD = (Tensor, *PACKED)  # what may stand for a tensor that is kept


def restored(packed: Any) -> Tensor:
    """The tensor for which a saved-tensor hook gave ``packed`` to autograd."""
    return packed.restore() if isinstance(packed, PACKED) else packed


class Call:
    """One call of a function whose saved tensors are dropped, and made again by a second run in the backward pass.

    The function's arguments are kept, and handed out where autograd saved one of them. All tensors are held without
    their graph, so there is no reference cycle, and everything is freed with the last ``Place``.
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], kept: Sequence[Any]) -> None:
        """``kept``: the arguments of the second run; tensors may be replaced by what ``restored`` turns into them."""
        self.function, self.kept = function, list(kept)
        self.wants_gradient = [isinstance(each, Tensor) and each.requires_grad for each in arguments]
        self.saved: list[weakref.ref[Place] | None] = []  # None: it was an argument
        self.outputs: list[tuple[int, View, weakref.ref[Place]]] = []

    def first_run(self, arguments: Sequence[Any]) -> Any:
        """The function's value; autograd gets places, or views of the kept arguments, instead of saved tensors."""
        pairs = zip(arguments, self.kept, strict=True)
        given = [(storage_of(mine), mine, kept) for mine, kept in pairs if isinstance(kept, (Tensor, Parked))]

        def drop(tensor: Tensor) -> Place | Parked | Tensor:
            storage = storage_of(tensor)
            for its_storage, mine, kept in given:
                view = view_of_shared(tensor, mine) if its_storage == storage else None
                if view is not None:
                    self.saved.append(None)
                    return kept.part(view) if isinstance(kept, Parked) else view.of(kept)
            place = Place(self)
            self.saved.append(weakref.ref(place))
            return place

        with saved_tensors_hooks(drop, restored):
            made = self.function(*arguments)
        given.clear()  # autograd holds the hook as long as the graph, and would hold what was given with it
        return made

    def output(self, number: int, view: View) -> Place:
        """A place for a view of one of the function's outputs, which the second run fills too."""
        place = Place(self)
        self.outputs.append((number, view, weakref.ref(place)))
        return place

    def make(self) -> None:
        """Runs the function again, up to the last tensor that is needed, and fills the places that are still held."""
        arguments = [
            restored(each).detach().requires_grad_(wants) if isinstance(each, HELD) else each
            for each, wants in zip(self.kept, self.wants_gradient, strict=True)
        ]
        if not any(reference is not None and reference() is not None for reference in self.saved):
            with torch.no_grad():  # torch.matmul asks its arguments, not this, whether they want gradients
                self.hand_out(self.function(*arguments))
            return
        n_saved = 0

        def keep(tensor: Tensor) -> None:
            nonlocal n_saved
            reference = self.saved[n_saved] if n_saved < len(self.saved) else None
            place = None if reference is None else reference()
            if place is not None:
                place.value = tensor.detach()
            n_saved += 1
            if n_saved == len(self.saved) and not self.outputs:
                raise _Enough

        try:
            with saved_tensors_hooks(keep, restored), torch.enable_grad():
                made = self.function(*arguments)
        except _Enough:
            return
        assert n_saved == len(self.saved), f"the second run saved {n_saved} tensors, the first {len(self.saved)}"
        self.hand_out(made)

    def hand_out(self, made: Any) -> None:
        """Fills the places of outputs that are still held, from the second run's value."""
        values = made if isinstance(made, tuple) else (made,)
        for number, view, reference in self.outputs:
            place = reference()
            if place is not None:
                place.value = view.of(values[number].detach())


def remade(function: Callable[..., Any], keep: Keep = Tensor.detach) -> Callable[..., Any]:
    """``function``, whose intermediate results are not kept for the backward pass but computed again in it.

    ``keep`` turns each tensor argument into what is held of it until then.

    One second run serves every part of the backward pass. Under zero-bubble schedules torch computes a pipeline stage's
    weight gradients by one backward pass for each group of weights, and torch.utils.checkpoint would run the forward
    pass again for each of them: 16 times a layer in a stage of two.
    """

    def run(*arguments: Any) -> Any:
        kept = [keep(each) if isinstance(each, Tensor) else each for each in arguments]
        return Call(function, arguments, kept).first_run(arguments)

    return run


class Remaker:
    """Makes chains of elementwise work, and their outputs, again in the backward pass instead of keeping them.

    Replace a module's ``fuse`` by ``around(fuse)``, and run its forward pass inside ``within(module)``: of its norms,
    for example, only the inputs are then kept, each as what ``keep`` returns for it. ``weights_stay``: weights stay in
    memory from the forward to the backward pass (not under ZeRO 3).
    """

    def __init__(self, *, weights_stay: bool, keep: Keep = Tensor.detach) -> None:
        self.weights_stay, self.keep = weights_stay, keep
        self.is_open = False
        # storage -> a tensor that a chain has put out, the chain's call, and the tensor's number among its outputs
        self.made: dict[int, tuple[weakref.ref[Tensor], Call, int]] = {}

    @contextmanager
    def within(self, module: nn.Module) -> Iterator[None]:
        """While entered, chains keep their inputs, and autograd keeps every other saved tensor but the chains' outputs.

        ``module``: whose weights are kept as views of the weights. Nothing changes where gradients are disabled.
        """

        def keep(tensor: Tensor) -> Place | HeldWeight | Parked | Tensor:
            # Detached: a graph that held its own tensors would hold itself, and stay where a pass retains it.
            found = self.place_of(tensor)
            if found is None:
                found = held_weight(weights if by_storage is None else by_storage.get(storage_of(tensor), ()), tensor)
            return self.keep(tensor) if found is None else found

        if not torch.is_grad_enabled():
            yield
            return
        weights = tuple(module.parameters())
        by_storage = by_storage_of(weights) if self.weights_stay else None  # otherwise they are gathered later
        with saved_tensors_hooks(keep, restored):
            self.is_open = True
            try:
                yield
            finally:
                self.is_open = False
                self.made.clear()

    def around(self, fuse: Fuse) -> Fuse:
        """``fuse``, whose chains and their outputs are made again where it is called inside ``within``.

        Not a chain that is linear in its first tensor and differentiated by that alone, such as a rotation, unless that
        one is made again, too: nothing else keeps it, so instead of it the output is kept, which is as large.
        """

        def run(function: Callable[..., Any], *tensors: Tensor, rows_vary: bool = False, **numbers: Any) -> Any:
            compute = partial(fuse, function, rows_vary=rows_vary, **numbers)
            if not (self.is_open and torch.is_grad_enabled()):
                return compute(*tensors)
            frees_first = is_linear(function) and not any(each.requires_grad for each in tensors[1:])
            if frees_first and self.place_of(tensors[0]) is None:
                return compute(*tensors)
            call = Call(compute, tensors, [self.kept(each) for each in tensors])
            made = call.first_run(tensors)
            given = {storage_of(each) for each in tensors}
            for number, each in enumerate(made if isinstance(made, tuple) else (made,)):
                if storage_of(each) not in given:
                    self.made[storage_of(each)] = (weakref.ref(each), call, number)
            return made

        return run

    def alone(self, fuse: Fuse) -> Fuse:
        """``fuse``, whose chains are made again wherever it is called; the chains' outputs are kept as usual."""

        def run(function: Callable[..., Any], *tensors: Tensor, rows_vary: bool = False, **numbers: Any) -> Any:
            compute = partial(fuse, function, rows_vary=rows_vary, **numbers)
            if not torch.is_grad_enabled():
                return compute(*tensors)
            return Call(compute, tensors, [self.kept(each) for each in tensors]).first_run(tensors)

        return run

    def kept(self, tensor: Tensor) -> Place | Parked | Tensor:
        """What a chain keeps of one of its inputs. Of a weight that does not stay, a copy: weights are small there."""
        if isinstance(tensor, nn.Parameter):
            return tensor.detach() if self.weights_stay else tensor.detach().clone()
        place = self.place_of(tensor)
        return self.keep(tensor) if place is None else place

    def place_of(self, tensor: Tensor) -> Place | None:
        """A place for the tensor if it is an output of a chain, or a view of one; else None."""
        reference, call, number = self.made.get(storage_of(tensor), (None, None, 0))
        made = None if reference is None else reference()
        if made is None or call is None:
            return None  # the output has been freed, and another tensor may lie in its memory
        view = view_of_shared(tensor, made)
        return None if view is None else call.output(number, view)


def held_weight(weights: Iterable[nn.Parameter], tensor: Tensor) -> HeldWeight | None:
    """The tensor as a view of one of the weights, or None. Called for each tensor that a layer saves."""
    storage = storage_of(tensor)
    for weight in weights:
        view = view_of_shared(tensor, weight) if storage_of(weight) == storage else None
        if view is not None:
            return HeldWeight(weight, view, weight._version)
    return None


def by_storage_of(weights: Iterable[nn.Parameter]) -> dict[int, list[nn.Parameter]]:
    """The weights in each storage, by its number."""
    found: dict[int, list[nn.Parameter]] = {}
    for weight in weights:
        found.setdefault(storage_of(weight), []).append(weight)
    return found


def storage_of(tensor: Tensor) -> int:
    """A number that is the same for tensors that share a storage, as long as one of them is alive."""
    return tensor.untyped_storage()._cdata
