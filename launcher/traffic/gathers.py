"""Computes how often ZeRO 3 gathers each weight in a step without a pipeline, by replaying DeepSpeed's bookkeeping.

DeepSpeed 0.19 knows the order of the modules from earlier passes. It gathers a module's weights before the module's
forward and backward pass, and prefetches about ``Sizes.prefetched`` further elements, as long as no more than
``Sizes.live`` are whole. After the pass it drops the weights, except those that are used again within ``Sizes.reused``
elements of weights, and those whose next use the prefetcher skipped because they were whole. So a rank that computes
with few weights gathers each once a micro-batch, and one with many gathers those of early layers twice.

The bookkeeping is that of fetch_sub_module and release_sub_module in deepspeed/runtime/zero/
partitioned_param_coordinator.py, replayed over the order of Roundtable's modules.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from launcher.traffic.step import Step
from modeling.logical import Half
from parallel.recompute import mode_of
from parallel.sizes import Sizes

LOOKED_UP = ("embed.weight", "embed_positions.weight")  # looked up by token or position ids, which have no gradient
KNOWN_FROM = 1  # the index of a run's first pass for which DeepSpeed knows the order of the modules
PASSES = 3  # micro-batches that are replayed; each later one gathers the same as the last of these


class Event(NamedTuple):
    """One event of a pass: a module's weights are needed (fetch), or its pass is over (release)."""

    kind: Literal["fetch", "release"]
    names: tuple[str, ...]


def gathers_by_weight(step: Step) -> Mapping[str, int]:
    """The number of times that each weight that does not stay whole is gathered in one step, after the first steps.

    Raises ValueError for a model with multi-token prediction, whose order of modules is not modelled here.
    """
    if step.n_further:
        raise ValueError(f"ZeRO 3 with model.mtp and more than {step.sizes.reused} elements a rank has no closed form")
    events, n_micro_batches = list(pass_events(step)), step.n_micro_batches
    passes = Passes(events, step.weights, step.sizes)
    # Before the order is known, every weight is dropped after its module, small ones too, except that an embedding's
    # backward pass drops nothing. After each step only the small weights are whole.
    is_within_step = KNOWN_FROM % n_micro_batches > 0
    passes.decide({name for name in LOOKED_UP if name in step.weights} if is_within_step else passes.persistent)
    counts = [passes.run() for _ in range(min(PASSES, n_micro_batches))]
    total = Counter[str]()
    for count in [*counts, *[counts[-1]] * (n_micro_batches - len(counts))]:
        total.update(count)
    return total


class Passes:
    """Forward and backward passes of one micro-batch after another, and which weights are whole between them."""

    def __init__(self, events: Sequence[Event], n_elements: Mapping[str, int], sizes: Sizes) -> None:
        self.events, self.n_elements, self.sizes = events, n_elements, sizes
        self.uses = [event.names for event in events if event.kind == "fetch"]
        self.persistent = {name for name, numel in n_elements.items() if numel <= sizes.persistent}
        self.whole = set(self.persistent)
        self.decided: dict[tuple[tuple[str, ...], int], set[str]] = {}

    def decide(self, whole: Collection[str]) -> None:
        """Replays the first pass in a known order, starting with the weights ``whole``.

        DeepSpeed decides in it which weights to drop after each module, and keeps these decisions for all later passes.
        """
        self.whole = set(whole)
        self.run()
        self.whole = set(self.persistent)

    def run(self) -> Counter[str]:
        """Replays one pass; returns how often it gathers each weight."""
        coordinator = Coordinator(self)
        for event in self.events:
            coordinator.fetch(event.names) if event.kind == "fetch" else coordinator.release(event.names)
        return coordinator.gathered


class Coordinator:
    """A model of DeepSpeed's parameter coordinator during one forward and backward pass."""

    def __init__(self, passes: Passes) -> None:
        self.uses, self.n_elements, self.sizes = passes.uses, passes.n_elements, passes.sizes
        self.whole, self.persistent, self.decided = passes.whole, passes.persistent, passes.decided
        self.queue = deque((name, number) for number, names in enumerate(self.uses) for name in names)
        self.seen: dict[str, int] = {}  # weight -> its last use that has left the queue
        self.number, self.n_gathered = 0, 0
        self.gathered = Counter[str]()

    def fetch(self, names: tuple[str, ...]) -> None:
        """Gathers a module's weights before its pass, and prefetches those of later modules as far as there is room."""
        self.gather(names)
        wanted = {name for name in names if self.seen.get(name, -1) < self.number}
        found: set[str] = set()
        while self.queue and len(found) < len(wanted):
            name, number = self.queue.popleft()
            self.seen[name] = number
            found.add(name)
        room = min(self.sizes.live - self.n_gathered, self.sizes.prefetched)
        ahead: dict[str, None] = {}
        n_ahead = 0
        while self.queue and n_ahead < room:
            name, number = self.queue.popleft()
            self.seen[name] = max(self.seen.get(name, -1), number)
            if name not in self.whole and name not in ahead:
                ahead[name] = None
                n_ahead += self.n_elements[name]
        self.gather(tuple(ahead))
        self.number += 1

    def gather(self, names: tuple[str, ...]) -> None:
        """Gathers those of the named weights that are not whole yet."""
        for name in names:
            if name not in self.whole:
                self.whole.add(name)
                self.gathered[name] += 1
                self.n_gathered += self.n_elements[name]

    def release(self, names: tuple[str, ...]) -> None:
        """Drops a module's weights after its pass, except those that are used again soon."""
        key = names, self.number
        if key not in self.decided:
            self.decided[key] = self.unused_soon(names)
        for name in self.decided[key] & self.whole:
            self.whole.discard(name)
            self.n_gathered -= self.n_elements[name]

    def unused_soon(self, names: tuple[str, ...]) -> set[str]:
        """Those of a module's weights that are dropped after its pass: not small, and not used again soon."""
        dropped = {name for name in names if name not in self.persistent and self.seen.get(name, -1) <= self.number}
        n_passed = 0
        for use in self.uses[self.number :]:
            if not dropped or n_passed >= self.sizes.reused:
                break
            dropped -= set(use)
            n_passed += sum(self.n_elements[name] for name in use)
        return dropped


class Node(NamedTuple):
    """A module: the names of its own weights, and the modules within it in the order of the forward pass.

    ``half`` is the half of the layer (attention or feed-forward) that it belongs to, norms included.
    """

    path: str
    names: tuple[str, ...] = ()
    children: tuple["Node", ...] = ()
    half: Half | None = None


def pass_events(step: Step) -> Iterator[Event]:
    """The events of one micro-batch in the order in which DeepSpeed's hooks see them, modules without weights too."""
    before, layers, after = nodes_of(step)
    yield Event("fetch", ())  # the model as a whole
    for node in [*before, *layers.values(), *after]:
        yield from forward(node)
    for node in reversed(after):
        yield from backward(step, node)
    for layer in reversed(list(layers)):
        yield from backward_of_layer(step, layer, layers[layer])
    for node in reversed(before):
        yield from backward(step, node)


def forward(node: Node) -> Iterator[Event]:
    """The events of a module's forward pass, including the modules within it."""
    yield Event("fetch", node.names)
    for child in node.children:
        yield from forward(child)
    yield Event("release", node.names)


def backward(step: Step, node: Node) -> Iterator[Event]:
    """The events of a module's backward pass; DeepSpeed's fetch hook runs for each output that takes a gradient.

    The input of an embedding lookup takes no gradient, so DeepSpeed's release hook never runs for it.
    """
    for _ in range(outputs_of(step, node)):
        yield Event("fetch", node.names)
    for child in reversed(node.children):
        yield from backward(step, child)
    if f"{node.path}.weight" not in LOOKED_UP:
        yield Event("release", node.names)


def outputs_of(step: Step, node: Node) -> int:
    """The number of a module's outputs that take a gradient: one, and for a router one more for each of its losses."""
    moe = step.model.moe
    if moe is None or not is_router(step, node):
        return 1
    return 1 + (moe.balance_coefficient > 0) + (moe.z_loss > 0)


def is_router(step: Step, node: Node) -> bool:
    """Whether a module scores the experts."""
    return first_dim(step, node) == "scores"


def first_dim(step: Step, node: Node) -> str | None:
    """The name of the first dim of a module's first weight; None where it has no weights of its own."""
    return step.tensors[node.names[0]].weight.dims[0] if node.names else None


def backward_of_layer(step: Step, layer: int, node: Node) -> Iterator[Event]:
    """The events of a layer's backward pass, including its recomputation.

    Recomputation starts after the backward pass of the layer's last product or norm has begun, and ends when that
    module's inputs are there. Where the layer ends in something else that saves a tensor (experts, or the shared
    expert's gate), it starts before.
    """
    repeats = {"full": node.children, "feed_forward": [each for each in node.children if each.half == "feed_forward"]}
    repeated = [event for each in repeats.get(mode_of(step.recompute, layer), ()) for event in forward(each)]
    if not repeated:
        yield from backward(step, node)
        return
    last = next(leaf for leaf in leaves_backwards(node) if not leaf.path.endswith("_bias"))  # a bias keeps nothing
    begins_before = step.tensors[last.names[0]].weight.dims[0] in (
        "experts",
        "one",
    )  # experts, or the shared one's gate
    if not begins_before:
        repeated = repeated[: repeated.index(Event("fetch", last.names)) + 1]
    is_done = False
    for event in backward(step, node):
        begins = not is_done and event == Event("fetch", last.names)
        is_done = is_done or begins
        if begins and begins_before:
            yield from repeated
        yield event
        if begins and not begins_before:
            yield from repeated


def leaves_backwards(node: Node) -> Iterator[Node]:
    """The modules with weights within ``node``, in reverse order of the forward pass."""
    for child in reversed(node.children):
        yield from leaves_backwards(child)
    if node.names:
        yield node


def nodes_of(step: Step) -> tuple[list[Node], dict[int, Node], list[Node]]:
    """The modules before the layers, the layers by number, and the modules after them, in order of the forward pass."""
    names: dict[str, list[str]] = {}
    for name in step.weights:
        names.setdefault(name.rpartition(".")[0], []).append(name)
    if step.model.tie_embeddings:
        names["head"] = ["embed.weight"]
    before, after = [], []
    within: dict[int, dict[str, tuple[str, ...]]] = {layer: {} for layer in step.layers}
    for path, own in names.items():
        layer = step.tensors[own[0]].layer if path != "head" else None
        if layer is not None:
            within[layer][path] = tuple(own)
        else:
            (before if path.startswith("embed") else after).append(Node(path, tuple(own)))
    return before, {layer: layer_node(step, f"layers.{layer}", own) for layer, own in within.items()}, after


def layer_node(step: Step, path: str, names: Mapping[str, tuple[str, ...]]) -> Node:
    """The node of a layer, with its norms, its attention and its feed-forward half as children in order."""
    children = []
    halves: tuple[Half, ...] = ("attention", "feed_forward")
    for half in halves:
        norms = [
            Node(each, names[each], half=half)
            for each in (f"{path}.{half}_norm", f"{path}.{half}_post_norm")
            if each in names
        ]
        within = [Node(each, own) for each, own in names.items() if each.startswith(f"{path}.{half}.")]
        node = Node(f"{path}.{half}", (), arranged(step, f"{path}.{half}", within), half)
        n_before = 0 if step.model.norm_placement == "post" else 1
        children += [*norms[:n_before], node, *norms[n_before:]]
    return Node(path, (), tuple(children))


def arranged(step: Step, path: str, nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The modules within half a layer, in the order of its forward pass, which is nearly that of ``nodes``."""
    late = {"q_norm": 2, "k_norm": 2, "output_gate": 3, "o": 4, "o_bias": 5, "down_bias": 4, "shared_gate": 4}
    found = sorted(nodes, key=lambda node: late.get(node.path.removeprefix(f"{path}."), 0))
    shared = [node for node in found if node.path.startswith(f"{path}.shared.")]
    rest = [node for node in found if node not in shared]
    children = []
    for node in rest:
        if first_dim(step, node) == "one":  # the shared expert's gate
            children.append(Node(f"{path}.shared", (), tuple(shared)))
            shared = []
        children.append(node)
        if is_router(step, node):
            children.append(Node(f"{path}.sender"))
    return (*children, *([Node(f"{path}.shared", (), tuple(shared))] if shared else []))
