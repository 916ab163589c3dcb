"""Functions that torch compiles, called past torch's own wrapper where such sizes have come before.

What `torch.compile` returns finds the compiled code anew in each call, by guards, and enters and leaves its compiler's
state: 45 microseconds of the host for a gate of SwiGLU on a CPU (torch 2.13, AMD EPYC), of which the code that it
finds takes 8, and more on hosts of GPUs, which then wait. What code a call comes to depends on nothing but sizes here,
so the first call with some sizes goes torch's way, and what it came to is called from then on: with the same sizes,
and with all others that the code was made for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
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


@dataclass(frozen=True)
class Span:
    """All calls that one code was made for: their tensors' first dims are sizes that vary, or numbers."""

    code: Callable[..., Sequence[Tensor]]
    places: tuple[tuple[int, ...], ...]  # of each size that varies: the tensors whose first dim it is
    fixed: tuple[tuple[int, int], ...]  # tensors whose first dim is one number
    bounds: tuple[tuple[int, int | None], ...]  # of each size that varies: the least and the most that it may be
    holds: Callable[..., bool]  # what else torch asks of the sizes that vary
    sizes: tuple[int, ...]  # as Route.sizes: which of the sizes that vary they are
    given: tuple[int, ...]  # as Route.given
    made: tuple[int, ...]  # as Route.made

    def route(self, firsts: Sequence[int]) -> Route | None:
        """For tensors with these first dims; None: the code is not for them."""
        found = [firsts[places[0]] for places in self.places]
        if any(firsts[place] != number for place, number in self.fixed):
            return None
        for size, places, (least, most) in zip(found, self.places, self.bounds, strict=True):
            if size < least or (most is not None and size > most) or any(firsts[place] != size for place in places):
                return None
        if not self.holds(*found):
            return None
        return Route(self.code, tuple([found[place] for place in self.sizes]), self.given, self.made)


class Direct:
    """``function(*tensors)``, compiled: a pure function whose value is a tuple of tensors, or None.

    All but the first dims of its tensors, which differ where ``rows_vary``, is the same in each call. Autograd is off.
    """

    def __init__(self, function: Callable[..., Any], *, rows_vary: bool) -> None:
        self.rows_vary = rows_vary
        # By the tensors' first dims, where rows vary. None: what torch makes of the call is not told by its code alone.
        self.routes: dict[tuple[int, ...], Route | None] = {}
        self.spans: list[Span] = []
        self.seen: list[Seen] = []
        self.checked: Callable[..., Any] = torch.compile(
            function, backend=self.build, fullgraph=True, dynamic=False, options={"guard_filter_fn": sizes_alone}
        )

    def __call__(self, tensors: Sequence[Tensor]) -> Values:
        """The function's values; it is compiled here, where torch has no code for such sizes yet."""
        firsts = tuple([tensor.shape[0] for tensor in tensors]) if self.rows_vary else ()
        route = self.routes.get(firsts)
        if route is not None:
            return route(tensors)
        for span in self.spans:
            if (route := span.route(firsts)) is not None:
                return route(tensors)
        views = [view_of(tensor, rows_vary=self.rows_vary) for tensor in tensors]
        self.seen.clear()
        made = self.checked(*views) or ()
        if firsts not in self.routes:
            self.learn(firsts, views, made)
        self.seen.clear()
        return made

    def learn(self, firsts: tuple[int, ...], tensors: Sequence[Tensor], made: Values) -> None:
        """Keeps what the call came to, for its sizes and for all that its code was made for."""
        if len(self.routes) >= MOST_ROUTES:
            self.routes.clear()
        self.routes[firsts] = route = route_of(self.seen, tensors, made)
        if route is not None and self.rows_vary and (examples := self.seen[0].take_examples()):
            span = span_of(route, examples, len(tensors))
            self.spans += [] if span is None else [span]

    def build(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """A backend of torch's: inductor's code, which tells of each call that comes to it by torch's way."""
        from torch._dynamo.eval_frame import innermost_fn  # takes a second, and is there by now

        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"] if self.rows_vary else []
        stands = [node.meta.get("example_value") for node in inputs]
        code: Callable[..., Any] = torch._inductor.compile(graph, examples, options={"compile_threads": 1})  # type: ignore[assignment]
        bare = innermost_fn(code)  # torch's wrapper has its compiler look away, which does not look at direct calls

        def take_examples() -> list[Any]:
            """What stood for the arguments as this was compiled: once, for it holds on to all of the compiler's."""
            taken = stands[:]
            stands.clear()
            return taken

        def told(*given: Any) -> Any:
            made = code(*given)
            self.seen.append(Seen(bare, given, made, take_examples))
            return made

        return told


class Seen(NamedTuple):
    """A call of compiled code by torch's way."""

    code: Callable[..., Sequence[Tensor]]
    given: Sequence[Any]
    made: Sequence[Tensor]
    take_examples: Callable[[], list[Any]]


def route_of(seen: Sequence[Seen], tensors: Sequence[Tensor], values: Values) -> Route | None:
    """How a call with these tensors came to its values by one call of compiled code; None: it cannot be told."""
    if len(seen) != 1:
        return None
    code, arguments, made, _ = seen[0]
    sizes = tuple(each for each in arguments if isinstance(each, int))
    rest = iter(range(len(tensors), len(tensors) + len(sizes)))
    given = tuple(next(rest) if isinstance(each, int) else place_of(each, tensors) for each in arguments)
    places = tuple(place_of(each, made) for each in values)
    return None if None in (*given, *places) else Route(code, sizes, given, places)  # type: ignore[arg-type]


def span_of(route: Route, examples: Sequence[Any], n_tensors: int) -> Span | None:
    """All calls that the route's code was made for, from what stood for its arguments; None: it cannot be told.

    torch tells sizes as expressions of symbols, with the range of each and with what it found on the way: that two are
    equal, or that a product stays below 2^31. Whatever is no plain symbol or number here is left to torch.
    """
    import sympy  # as torch has

    stands = [*zip(route.given, examples, strict=True)]
    firsts = {place: size_of(each.shape[0]) for place, each in stands if place < n_tensors}
    numbers = [size_of(each) for place, each in stands if place >= n_tensors]
    symbols = list(dict.fromkeys(each for each in firsts.values() if not isinstance(each, int)))
    if not symbols or not all(each.is_Symbol for each in symbols) or {*numbers} - {*symbols}:
        return None
    varying = next(each.shape[0] for place, each in stands if place < n_tensors and firsts[place] == symbols[0])
    environment = varying.node.shape_env
    guards = [guard.expr.xreplace(environment.replacements) for guard in environment.guards]
    if any(guard.atoms(sympy.Function) or guard.free_symbols - {*symbols} for guard in guards):
        return None
    ranges = [environment.var_to_range[symbol] for symbol in symbols]
    return Span(
        route.code,
        tuple(tuple(place for place, each in firsts.items() if each == symbol) for symbol in symbols),
        tuple((place, each) for place, each in firsts.items() if isinstance(each, int)),
        tuple((int(each.lower), int(each.upper) if each.upper.is_Integer else None) for each in ranges),
        sympy.lambdify(symbols, sympy.And(*guards), modules="math"),
        tuple(symbols.index(each) for each in numbers),
        route.given,
        route.made,
    )


def size_of(size: int | torch.SymInt) -> Any:
    """A number, or the expression that stands for it."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


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
