"""Chains of elementwise operations between matrix products: computed plainly, or compiled into one kernel each.

A chain is a pure function of tensors whose rows are independent (norms, rotations, gates), or depend on a few rows
before them and come with a function for their gradients (``rows_meet``). A compiled chain reads its inputs and writes
its outputs once in each pass. It keeps only its inputs for the backward pass, which computes everything between again;
where it is linear in one of them, not even that one. The plain function is the reference. A module calls it through its
``fuse``, which is ``plainly``, ``compiled`` or another ``Fuse``.

Whatever observes operations (recomputation, profiles, plans) sees a compiled chain as one operator,
``roundtable::chain(name, tensors) -> tensors``, and fake tensors go through the plain function. Where nothing observes,
the compiled code is called directly.
"""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from modeling.kernels.direct import Direct, is_plain

ROW_BYTES = 1 << 16  # a longer row does not stay in a core's registers: a tensor summed over it is read once more
# For the gradient of a chain whose rows depend on each other: the kernels that inductor writes for it
# (benchmarks/gpu/written_kernels.py), and how often these write or read an fp32 tensor between them.
MEETING_KERNELS = 8
MEETING_PASSES = 3
LEAST_ROWS = 2  # torch compiles a dim of 0 or 1 as that number, so fewer rows are computed plainly


class Fuse(Protocol):
    """``function(*tensors, **numbers)``, in one kernel or in many; a tensor, or a tuple of them.

    ``rows_vary`` says that the tensors' first dim differs from call to call.
    """

    def __call__(self, function: Callable[..., Any], *tensors: Tensor, rows_vary: bool = False, **numbers: Any) -> Any:
        """The function's value, which can be differentiated by the tensors."""


def plainly(function: Callable[..., Any], *tensors: Tensor, rows_vary: bool = False, **numbers: Any) -> Any:
    """The function called as it is, operation by operation: the reference for every other ``Fuse``."""
    return function(*tensors, **numbers)


def compiled(function: Callable[..., Any], *tensors: Tensor, rows_vary: bool = False, **numbers: Any) -> Any:
    """The function as one kernel in each pass, compiled at the first call with these shapes and dtypes.

    torch does not compile while a TorchDispatchMode is active, so the first call must be outside of one; later calls
    need not be.
    """
    if is_never_compiled(function) or (rows_vary and any(tensor.shape[0] < LEAST_ROWS for tensor in tensors)):
        return function(*tensors, **numbers)
    told = tuple(sorted(numbers.items()))
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        made = _Fused.apply(function, rows_vary, told, *tensors)
    else:
        made = run(chain_of(function, told, None, rows_vary, tensors), tensors)
    return made[0] if len(made) == 1 else tuple(made)


class _Fused(Function):
    """(function, rows_vary, numbers, *tensors) -> the function's values. Saves the tensors that its gradient needs."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], rows_vary: bool, numbers: Any, *tensors: Tensor) -> Any:  # type: ignore[override]
        ctx.drops_first = is_linear(function) and not any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(*tensors[1:] if ctx.drops_first else tensors)
        ctx.chain = function, rows_vary, numbers
        made = tuple(run(chain_of(function, numbers, None, rows_vary, tensors), tensors))
        ctx.mark_non_differentiable(*(each for each in made if not each.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        function, rows_vary, numbers = ctx.chain
        wanted = tuple(place for place, wants in enumerate(ctx.needs_input_grad[3:]) if wants)
        floats = [grad.contiguous() for grad in grads if grad.is_floating_point()]
        tensors = ctx.saved_tensors  # read only once: under recomputation they can be unpacked only once
        if ctx.drops_first:
            tensors = (floats[0], *tensors)  # in place of the dropped tensor, on which the gradient does not depend
        given = (*tensors, *floats)
        made = run(chain_of(function, numbers, (wanted, len(tensors)), rows_vary, given), given)
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, grad in zip(wanted, made, strict=True):
            found[place + 3] = grad
        return tuple(found)


def in_parts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function whose value is several parts side by side, for each of which inductor may write a kernel."""
    function.in_parts = True  # type: ignore[attr-defined]
    return function


def rows_meet(gradient: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a function whose rows depend on some rows before them, with the function that computes its gradients.

    ``gradient(*tensors, grad, **numbers)`` returns a gradient for each tensor, None for one that has none. Of the
    shifts and slices that autograd would derive, inductor makes more kernels.
    """

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        function.rows_meet = gradient  # type: ignore[attr-defined]
        return function

    return mark


def linear(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that is linear in its first tensor and has one value, of the same shape.

    If only that tensor is differentiated by, the gradient does not depend on it, and it is not kept.
    """
    function.is_linear = True  # type: ignore[attr-defined]
    return function


def is_linear(function: Callable[..., Any]) -> bool:
    """Whether the function is marked by ``linear``."""
    return getattr(function, "is_linear", False)


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that is one kernel already, and is called by ``fuse`` only for recomputation to see it."""
    function.is_never_compiled = True  # type: ignore[attr-defined]
    return function


def is_never_compiled(function: Callable[..., Any]) -> bool:
    """Whether the function is marked by ``never_compiled``."""
    return getattr(function, "is_never_compiled", False)


@dataclass
class Chain:
    """One function, or its gradients, for tensors of certain shapes and dtypes, with its compiled code."""

    label: str  # the function's name
    function: Callable[..., tuple[Tensor, ...]]
    rows_vary: bool
    wanted: tuple[int, ...] | None  # for gradients, the places of the tensors differentiated by; None: values
    sums_rows: bool  # a gradient is summed over rows (by a vector that all rows share): that takes one more kernel
    in_parts: bool = False  # as marked by ``in_parts``
    rows_meet: bool = False  # as marked by ``rows_meet``
    compiled: Direct | None = None
    first_call_seconds: float = 0.0

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The compiled function's values. The first call compiles it."""
        if self.compiled is not None:
            return self.compiled(tensors)
        started = time.perf_counter()
        self.compiled = Direct(self.function, rows_vary=self.rows_vary)
        made = self.compiled(tensors)
        self.first_call_seconds = time.perf_counter() - started
        return made

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fake tensors of the values' shapes and dtypes, for fake tensors."""
        if self.wanted is None:
            return list(self.function(*tensors))
        return [torch.empty_like(tensors[place]) for place in self.wanted]

    @property
    def n_kernels(self) -> int:
        """The number of kernels that one call launches."""
        if self.rows_meet and self.wanted is not None:
            return MEETING_KERNELS
        return 2 if self.sums_rows else 1

    def moved_bytes(self, given: Sequence[Tensor], made: Sequence[Tensor]) -> int:
        """The bytes that its kernels read and write: each tensor once, and some inputs once more.

        Inputs are read again by the kernel that sums over rows, by kernels of further parts, and where rows are long.
        """
        longest = max(each.shape[-1] * each.element_size() for each in given if each.dim())
        parts = (1 if self.wanted is None else 2) if self.in_parts else 0
        readings = 1 + self.sums_rows + parts + (longest > ROW_BYTES)
        read = {id(each): each.nbytes for each in given}  # a gradient may stand in another tensor's place, too
        moved = readings * sum(read.values()) + sum(each.nbytes for each in made)
        if self.rows_meet and self.wanted is not None:  # one kernel more reads what is convolved
            moved += given[0].nbytes + MEETING_PASSES * 4 * given[0].numel()
        return moved


@dataclass
class _Chains:
    """Every chain of this process so far."""

    by_key: dict[Any, str] = field(default_factory=dict)
    by_name: dict[str, Chain] = field(default_factory=dict)


_chains = _Chains()


def known_chains() -> list[Chain]:
    """The chains that this process has called."""
    return list(_chains.by_name.values())


def chain_named(name: str) -> Chain:
    """The chain of the name that ``roundtable::chain`` was called with."""
    return _chains.by_name[name]


def chain_of(
    function: Callable[..., Any],
    numbers: tuple[tuple[str, Any], ...],
    wanted: tuple[tuple[int, ...], int] | None,
    rows_vary: bool,
    tensors: Sequence[Tensor],
) -> str:
    """The name of the chain for a function and such tensors, which is made if it is new.

    ``wanted`` has the places of the tensors that it is differentiated by, and the number of its tensors; None means
    that it is not differentiated. A vector among the tensors is shared by all rows.
    """
    skipped = 1 if rows_vary else 0
    shapes = tuple((each.shape[skipped:], each.stride(), each.dtype, each.device) for each in tensors)
    key = (function, numbers, wanted, rows_vary, shapes, torch.are_deterministic_algorithms_enabled())
    name = _chains.by_key.get(key)
    if name is None:
        label = function.__name__ + ("" if wanted is None else " backward")
        name = f"{label} {len(_chains.by_name)}"
        sums_rows = wanted is not None and any(tensors[place].dim() == 1 for place in wanted[0])
        plain = values(function, dict(numbers)) if wanted is None else gradients(function, dict(numbers), *wanted)
        # With a code object of its own, since torch limits how many versions it compiles of one code object.
        plain.__code__ = plain.__code__.replace(co_name="".join(c if c.isalnum() else "_" for c in name))  # type: ignore[attr-defined]
        places = None if wanted is None else wanted[0]
        in_parts, meet = (hasattr(function, mark) for mark in ("in_parts", "rows_meet"))
        _chains.by_name[name] = Chain(label, plain, rows_vary, places, sums_rows, in_parts, meet)
        _chains.by_key[key] = name
    return name


def values(function: Callable[..., Any], numbers: dict[str, Any]) -> Callable[..., tuple[Tensor, ...]]:
    """(*tensors) -> the function's values, as a tuple even if there is only one."""

    def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
        made = function(*tensors, **numbers)
        return made if isinstance(made, tuple) else (made,)

    return compute


def gradients(
    function: Callable[..., Any], numbers: dict[str, Any], wanted: tuple[int, ...], n_tensors: int
) -> Callable[..., tuple[Tensor, ...]]:
    """(*n_tensors tensors, *gradients by the function's values) -> the gradients by the tensors ``wanted``.

    ``wanted`` has the tensors' places.
    """
    own = getattr(function, "rows_meet", None)

    def compute(*given: Tensor) -> tuple[Tensor, ...]:
        if own is not None:
            found = own(*given, **numbers)
            return tuple(found[place] for place in wanted)

        def of_wanted(*changing: Tensor) -> tuple[Tensor, ...]:
            tensors = list(given[:n_tensors])
            for place, tensor in zip(wanted, changing, strict=True):
                tensors[place] = tensor
            made = function(*tensors, **numbers)
            made = made if isinstance(made, tuple) else (made,)
            return tuple(each for each in made if each.is_floating_point())

        pull = torch.func.vjp(of_wanted, *(given[place] for place in wanted))[1]
        return pull(given[n_tensors:])

    return compute


@functools.cache
def _library() -> torch.library.Library:
    """The operator, defined when the first chain runs."""
    library = torch.library.Library("roundtable", "FRAGMENT")
    library.define("chain(str name, Tensor[] tensors) -> Tensor[]")
    library.impl("chain", lambda name, tensors: list(chain_named(name)(tensors)), "CompositeExplicitAutograd")
    torch.library.register_fake("roundtable::chain", lambda name, tensors: chain_named(name).fake(tensors), lib=library)
    return library


def run(name: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The values of the chain ``name``, computed by the operator if something may be observing operations."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return run(name, tensors)
    if is_plain(tensors):
        return chain_named(name)(tensors)
    _library()
    return torch.ops.roundtable.chain(name, list(tensors))
