"""Functions that torch compiles, called past torch's own wrapper where such sizes have come before.

What `torch.compile` returns finds the compiled code anew in each call, by guards, and enters and leaves its compiler's
state: 45 microseconds of the host for a gate of SwiGLU on a CPU (torch 2.13, AMD EPYC), of which the code that it
finds takes 8, and more on hosts of GPUs, which then wait. What code a call comes to depends on nothing but sizes here,
so the first call with some sizes goes torch's way, and what it came to is called from then on.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.eval_frame import innermost_fn
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

MOST_ROUTES = 4096  # sizes that are known; experts' rows may come in more
REAL = (Tensor, Parameter)

Values = tuple[Tensor, ...]


class Route(NamedTuple):
    """What a call with certain sizes comes to."""

    code: Callable[..., Sequence[Tensor]]  # what torch's compiler made
    sizes: tuple[int, ...]  # numbers that the code takes beside tensors
    given: tuple[int, ...]  # its arguments: places among the call's tensors, followed by ``sizes``
    made: tuple[int, ...]  # the call's values: places among what the code makes

    def __call__(self, tensors: Sequence[Tensor]) -> Values:
        """The values."""
        pool = (*tensors, *self.sizes)
        found = self.code(*[pool[place] for place in self.given])
        return tuple([found[place] for place in self.made])


class Direct:
    """``function(*tensors)``, compiled: a pure function whose value is a tuple of tensors, or None.

    All but the first dims of its tensors, which differ where ``rows_vary``, is the same in each call. Autograd is off.
    """

    def __init__(self, function: Callable[..., Any], *, rows_vary: bool) -> None:
        self.rows_vary = rows_vary
        self.routes: dict[Any, Route | None] = {}  # None: what torch makes of the call is not told by its code alone
        self.seen: list[tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]] = []
        options = {"guard_filter_fn": sizes_alone}
        self.checked = torch.compile(function, backend=self.build, fullgraph=True, dynamic=False, options=options)

    def __call__(self, tensors: Sequence[Tensor]) -> Values:
        """The function's values; it is compiled here, where torch has no code for such sizes yet."""
        sizes = tuple([tensor.shape[0] for tensor in tensors]) if self.rows_vary else ()
        key = sizes, torch.are_deterministic_algorithms_enabled()
        route = self.routes.get(key)
        if route is not None:
            return route(tensors)
        views = [view_of(tensor, rows_vary=self.rows_vary) for tensor in tensors]
        self.seen.clear()
        made = self.checked(*views) or ()
        if key not in self.routes:
            if len(self.routes) >= MOST_ROUTES:
                self.routes.clear()
            self.routes[key] = route_of(self.seen, views, made)
        self.seen.clear()
        return made

    def build(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """A backend of torch's: inductor's code, which tells of each call that comes to it by torch's way."""
        code = torch._inductor.compile(graph, examples, options={"compile_threads": 1})
        bare = innermost_fn(code)  # torch's wrapper has its compiler look away, which does not look at direct calls

        def told(*given: Any) -> Any:
            made = code(*given)
            self.seen.append((bare, given, made))
            return made

        return told


def route_of(
    seen: Sequence[tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]], tensors: Sequence[Tensor], values: Values
) -> Route | None:
    """How a call with these tensors came to its values by one call of compiled code; None: it cannot be told."""
    if len(seen) != 1:
        return None
    code, arguments, made = seen[0]
    sizes = tuple(each for each in arguments if isinstance(each, int))
    rest = iter(range(len(tensors), len(tensors) + len(sizes)))
    given = tuple(next(rest) if isinstance(each, int) else place_of(each, tensors) for each in arguments)
    places = tuple(place_of(each, made) for each in values)
    return None if None in (*given, *places) else Route(code, sizes, given, places)  # type: ignore[arg-type]


def place_of(tensor: Any, among: Sequence[Any]) -> int | None:
    """Where the very same tensor stands."""
    return next((place for place, each in enumerate(among) if each is tensor), None)


def sizes_alone(guards: Sequence[Any]) -> list[bool]:
    """Which of torch's guards are looked at in each call by torch's way: those on sizes that vary."""
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


def view_of(tensor: Tensor, *, rows_vary: bool) -> Tensor:
    """A view, the call's own: torch takes one tensor in two places for one input, and keeps marks for later calls."""
    view = tensor.detach()
    if rows_vary:
        torch._dynamo.mark_dynamic(view, 0)
    return view


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are torch's own, and nobody looks at operations: an operator of ours may be left out."""
    return not is_in_torch_dispatch_mode() and all(type(tensor) in REAL for tensor in tensors)
