"""Compiled functions, called past torch's own wrapper where the same sizes have been seen before.

What `torch.compile` returns finds the compiled code anew in each call, by guards, and enters and leaves the compiler's
state: 45 microseconds of the host for a gate of SwiGLU on a CPU (torch 2.13, AMD EPYC), of which the compiled code
itself takes 8, and more on hosts of GPUs, which then wait. Here the code for a call depends on nothing but sizes. So
the first call with some sizes goes through torch, and the code that it reached is called directly from then on: with
the same sizes, and with all others that it was compiled for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

MOST_ROUTES = 4096  # sizes that are remembered; experts' rows may have more
REAL = (Tensor, Parameter)

Values = tuple[Tensor, ...]


class Route(NamedTuple):
    """How to compute a call with certain sizes directly: the compiled code, and where its arguments and values are."""

    code: Callable[..., Sequence[Tensor]]  # compiled by torch
    sizes: tuple[int, ...]  # numbers that the code takes beside tensors
    given: tuple[int, ...]  # the code's arguments, as places in the call's tensors followed by ``sizes``
    made: tuple[int, ...]  # the call's values, as places in what the code returns

    def __call__(self, tensors: Sequence[Tensor]) -> Values:
        """The call's values for these tensors."""
        pool = (*tensors, *self.sizes)
        found = self.code(*[pool[place] for place in self.given])
        return tuple([found[place] for place in self.made])


@dataclass(frozen=True)
class Span:
    """All calls that one compiled code is for. Each tensor's first dim is a size that varies, or a fixed number."""

    code: Callable[..., Sequence[Tensor]]
    places: tuple[tuple[int, ...], ...]  # for each size that varies: the tensors whose first dim it is
    fixed: tuple[tuple[int, int], ...]  # (tensor, number) where a first dim is a fixed number
    bounds: tuple[tuple[int, int | None], ...]  # for each size that varies: its least and its largest value
    holds: Callable[..., bool]  # torch's further conditions on the sizes that vary
    sizes: tuple[int, ...]  # for each of Route.sizes: which of the sizes that vary it is
    given: tuple[int, ...]  # as Route.given
    made: tuple[int, ...]  # as Route.made

    def route(self, firsts: Sequence[int]) -> Route | None:
        """The route for tensors with these first dims; None if the code is not for them."""
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
    """``function(*tensors)``, compiled. The function is pure, and returns a tuple of tensors, or None.

    All that describes its tensors is the same in each call, except first dims where ``rows_vary``. Autograd must be
    off.
    """

    def __init__(self, function: Callable[..., Any], *, rows_vary: bool) -> None:
        self.rows_vary = rows_vary
        # By the tensors' first dims, where rows vary. None: the call must go through torch each time.
        self.routes: dict[tuple[int, ...], Route | None] = {}
        self.spans: list[Span] = []
        self.seen: list[Seen] = []
        self.checked: Callable[..., Any] = torch.compile(
            function, backend=self.build, fullgraph=True, dynamic=False, options={"guard_filter_fn": sizes_alone}
        )

    def __call__(self, tensors: Sequence[Tensor]) -> Values:
        """The function's values. It is compiled here if torch has no code for such sizes yet."""
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
        """Stores the route of a call: for its sizes, and for all sizes that its code was compiled for."""
        if len(self.routes) >= MOST_ROUTES:
            self.routes.clear()
        self.routes[firsts] = route = route_of(self.seen, tensors, made)
        if route is not None and self.rows_vary and (examples := self.seen[0].take_examples()):
            span = span_of(route, examples, len(tensors))
            self.spans += [] if span is None else [span]

    def build(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        """The backend given to torch.compile: inductor's code, wrapped to record each call that comes through torch."""
        from torch._dynamo.eval_frame import innermost_fn  # imported late: it takes a second, and compiling needs it

        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"] if self.rows_vary else []
        stands = [node.meta.get("example_value") for node in inputs]
        code: Callable[..., Any] = torch._inductor.compile(graph, examples, options={"compile_threads": 1})  # type: ignore[assignment]
        bare = innermost_fn(code)  # without the wrapper that turns off torch's compiler, as direct calls do not need it

        def take_examples() -> list[Any]:
            """The symbolic arguments of the compilation, once: they keep all of the compiler's state alive."""
            taken = stands[:]
            stands.clear()
            return taken

        def told(*given: Any) -> Any:
            made = code(*given)
            self.seen.append(Seen(bare, given, made, take_examples))
            return made

        return told


class Seen(NamedTuple):
    """The record of one call of compiled code through torch."""

    code: Callable[..., Sequence[Tensor]]
    given: Sequence[Any]
    made: Sequence[Tensor]
    take_examples: Callable[[], list[Any]]


def route_of(seen: Sequence[Seen], tensors: Sequence[Tensor], values: Values) -> Route | None:
    """How a call with these tensors got its values from one call of compiled code; None if that cannot be told."""
    if len(seen) != 1:
        return None
    code, arguments, made, _ = seen[0]
    sizes = tuple(each for each in arguments if isinstance(each, int))
    rest = iter(range(len(tensors), len(tensors) + len(sizes)))
    given = tuple(next(rest) if isinstance(each, int) else place_of(each, tensors) for each in arguments)
    places = tuple(place_of(each, made) for each in values)
    return None if None in (*given, *places) else Route(code, sizes, given, places)  # type: ignore[arg-type]


def span_of(route: Route, examples: Sequence[Any], n_tensors: int) -> Span | None:
    """All calls that the route's code was compiled for, from its symbolic arguments; None if that cannot be told.

    torch describes sizes as expressions of symbols, with the range of each and with conditions found on the way: that
    two are equal, or that a product stays below 2^31. Calls with sizes other than plain symbols or numbers are left to
    torch.
    """
    import sympy  # which torch depends on

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
    """A size as a number, or as the symbolic expression that stands for it."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def place_of(tensor: Any, among: Sequence[Any]) -> int | None:
    """The place of the very same tensor in the sequence; None if it is not there."""
    return next((place for place, each in enumerate(among) if each is tensor), None)


def sizes_alone(guards: Sequence[Any]) -> list[bool]:
    """Which of torch's guards to keep in calls through torch: only those on sizes that vary."""
    return [guard.guard_type == "SHAPE_ENV" for guard in guards]


def view_of(tensor: Tensor, *, rows_vary: bool) -> Tensor:
    """A view of the tensor, made for this call alone, its first dim marked as varying where ``rows_vary``.

    torch takes one tensor in two places for a single input, and marks on a tensor would stay for later calls.
    """
    view = tensor.detach()
    if rows_vary:
        torch._dynamo.mark_dynamic(view, 0)
    return view


def is_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are torch's own and nothing observes operations: then Roundtable's operators can be bypassed."""
    return not is_in_torch_dispatch_mode() and all(type(tensor) in REAL for tensor in tensors)
