"""Tensors made again in the backward pass: one more run for all of its parts, and nothing stays."""

import dataclasses
import gc
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import recomputation
from modeling.attention import Attention
from modeling.config import FamilyName
from modeling.kernels import expert_turns, experts
from modeling.kernels.expert_turns import GatesAndUps
from modeling.kernels.fuse import linear, plainly
from modeling.router import Router
from parallel.recompute import Recompute, apply_recompute
from parallel.remake import Call, Place, Remaker, remade
from small_models import build, example_config, packed_rows


class Layer:
    """A function of two weights that counts how often it runs."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.first, self.second = (torch.randn(4, 4, generator=generator, requires_grad=True) for _ in range(2))
        self.input = torch.randn(3, 4, generator=generator, requires_grad=True)
        self.runs = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(torch.tanh(hidden @ self.first) @ self.second) + hidden

    def gradients_in_parts(self, run: object) -> list[Tensor]:
        """Of the input, then of each weight, by a backward pass each."""
        total = run(self.input).square().sum()  # type: ignore[operator]
        parts = (self.input, self.first, self.second)
        return [torch.autograd.grad(total, part, retain_graph=True)[0] for part in parts]


def alive() -> int:
    return sum(type(thing) in (Call, Place) for thing in gc.get_objects())


def test_one_run_serves_every_part_and_gradients_are_the_same():
    layer = Layer()
    expected = layer.gradients_in_parts(layer)
    layer.runs = 0
    found = layer.gradients_in_parts(remade(layer))
    assert layer.runs == 2
    assert all(map(torch.equal, found, expected))


def test_torchs_own_runs_again_for_each_part():
    """Why there is another: should this fail, torch has learned it, and ours can go."""
    layer = Layer()
    layer.gradients_in_parts(lambda hidden: checkpoint(layer, hidden, use_reentrant=False))
    assert layer.runs == 4


def test_nothing_stays_once_the_graph_is_gone():
    """Without the garbage collector, which training switches off: a cycle would hold the activations."""
    gc.collect()
    gc.disable()
    try:
        before = alive()  # what tests before this one left, which may be frozen
        layer = Layer()
        layer.gradients_in_parts(remade(layer))
        block = Block(weights_stay=False)
        block.gradients(block.remade)
        assert alive() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("in_parts", [False, True])
def test_nothing_stays_of_a_graph_that_no_pass_has_freed(in_parts: bool) -> None:
    """As in a zero-bubble pipeline, whose backward passes come in parts and retain it. There activations stayed."""
    gc.collect()
    gc.disable()
    try:
        before, tensors = alive(), n_tensors()
        block = Block(weights_stay=True)
        with block.remaker.within(block):
            output = block.run_with(block.remaker.around(plainly)).exp()  # which keeps what it puts out
        if in_parts:
            parts = (block.input, block.scale, block.weight)
            assert all(torch.autograd.grad(output.sum(), part, retain_graph=True)[0].isfinite().all() for part in parts)
            del parts
        del output, block
        assert (alive(), n_tensors()) == (before, tensors)
    finally:
        gc.enable()


def test_planted_a_hook_that_hands_tensors_back_as_they_are_keeps_the_graph() -> None:
    gc.collect()
    gc.disable()
    try:
        before = n_tensors()
        for hands_back in (Tensor.detach, lambda tensor: tensor):
            scale = torch.ones(3, requires_grad=True)
            with saved_tensors_hooks(hands_back, lambda tensor: tensor):
                output = (scale * 2).exp().exp()
            del output, scale
            stays = n_tensors() > before
            assert stays == (hands_back is not Tensor.detach)
    finally:
        gc.enable()


def test_planted_a_function_that_saves_less_the_second_time_is_noticed():
    layer = Layer()

    def fickle(hidden: Tensor) -> Tensor:
        return layer(hidden) if layer.runs == 0 else hidden * 2

    with pytest.raises(AssertionError, match="the second run saved 0 tensors, the first"):
        remade(fickle)(layer.input).sum().backward()


def n_tensors() -> int:
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


def activated(hidden: Tensor, weight: Tensor) -> Tensor:
    """Elementwise work with a weight."""
    return torch.tanh(hidden * 2) * weight


def turned(hidden: Tensor) -> Tensor:
    """Some more, of what the first put out."""
    return hidden.sin() * hidden


class Block(nn.Module):
    """Two chains, one after the other, and a product of what they put out; counts their runs."""

    def __init__(self, *, weights_stay: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scale = nn.Parameter(torch.randn(4, generator=generator))
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.input = torch.randn(2, 3, 4, generator=generator, requires_grad=True)
        self.remaker = Remaker(weights_stay=weights_stay)
        self.runs: list[str] = []
        self.factor = 1.0

    def counted(self, function: object, *tensors: Tensor) -> Tensor:
        self.runs.append(function.__name__)  # type: ignore[attr-defined]
        return function(*tensors) * self.factor  # type: ignore[operator]

    def run_with(self, fuse: object) -> Tensor:
        one = fuse(partial(self.counted, activated), self.input, self.scale)  # type: ignore[operator]
        two = fuse(partial(self.counted, turned), one)  # type: ignore[operator]
        return F.linear(two, self.weight) + self.input

    def plain(self) -> Tensor:
        return self.run_with(plainly)

    def remade(self) -> Tensor:
        with self.remaker.within(self):
            return self.run_with(self.remaker.around(plainly))

    def gradients(self, run: object) -> list[Tensor]:
        total = run().square().sum()  # type: ignore[operator]
        return list(torch.autograd.grad(total, (self.input, self.scale, self.weight)))


@pytest.mark.parametrize("weights_stay", [True, False])
def test_chains_are_made_again_once_and_gradients_are_the_same(weights_stay: bool) -> None:
    block = Block(weights_stay=weights_stay)
    expected = block.gradients(block.plain)
    block.runs.clear()
    found = block.gradients(block.remade)
    assert all(map(torch.equal, found, expected))
    assert block.runs == ["activated", "turned"] * 2  # the second chain asks for what the first put out


@pytest.mark.parametrize(("between", "graph"), [(nn.Identity(), False), (torch.tanh, True)])
def test_a_second_run_makes_a_graph_only_for_what_was_saved_within(between: Any, graph: bool) -> None:
    """Its arguments want gradients as in the first run, by which torch.matmul decides what it multiplies how."""
    block, seen = Block(weights_stay=True), list[tuple[bool, bool]]()

    def chain(hidden: Tensor, scale: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), hidden.requires_grad))
        return between(hidden * scale) * 2

    def run(fuse: Any) -> Tensor:
        with block.remaker.within(block):
            return F.linear(fuse(chain, block.input, block.scale), block.weight)

    expected, found = (block.gradients(partial(run, fuse)) for fuse in (plainly, block.remaker.around(plainly)))
    assert all(map(torch.equal, found, expected))
    assert seen == [(True, True)] * 2 + [(graph, True)]


@pytest.mark.parametrize("by_factor", [False, True])
def test_a_linear_chain_is_made_again_only_if_its_input_is_kept_anyway(by_factor: bool) -> None:
    """As it is for the gradient by a factor. Otherwise the output is kept instead."""
    block, runs = Block(weights_stay=True), list[int]()
    factor = block.scale if by_factor else block.scale.detach()

    @linear
    def turn(hidden: Tensor, factor: Tensor) -> Tensor:
        runs.append(1)
        return hidden * factor

    with block.remaker.within(block):
        out = F.linear(block.remaker.around(plainly)(turn, block.input, factor), block.weight)
    found = torch.autograd.grad(out.square().sum(), (block.input, block.weight))
    plain = F.linear(block.input * factor, block.weight)
    assert all(map(torch.equal, found, torch.autograd.grad(plain.square().sum(), (block.input, block.weight))))
    assert len(runs) == (2 if by_factor else 1)


@pytest.mark.parametrize("weights_stay", [True, False])
def test_weights_whose_memory_goes_between_the_passes(weights_stay: bool) -> None:
    """As under ZeRO 3: a product finds its weight where it is by then, and a chain has a copy if it has to."""
    block = Block(weights_stay=weights_stay)
    expected = block.gradients(block.plain)
    total = block.remade().square().sum()
    for weight in (block.weight, block.scale) if not weights_stay else (block.weight,):
        there = weight.data
        weight.data = there.clone()
        there.fill_(float("nan"))
    found = torch.autograd.grad(total, (block.input, block.scale, block.weight))
    assert all(map(torch.equal, found, expected))


def test_planted_a_chain_that_computes_otherwise_the_second_time_changes_gradients():
    block = Block(weights_stay=True)
    expected = block.gradients(block.plain)
    total = block.remade().square().sum()
    block.factor = 1.5
    found = torch.autograd.grad(total, (block.input, block.scale, block.weight))
    assert not torch.equal(found[2], expected[2])


DROPPED: dict[Recompute, set[str]] = {
    "none": set(),
    "feed_forward": {"attention_norm", "feed_forward_norm", "feed_forward.gate", "feed_forward.up"},
    "selective": {"attention_norm", "attention.q", "attention.k", "attention.v", "feed_forward_norm"},
}


@pytest.mark.parametrize("weights_stay", [True, False])
@pytest.mark.parametrize("mode", DROPPED)
def test_what_a_mode_drops_is_gone_before_the_backward_pass(mode: Recompute, weights_stay: bool) -> None:
    """Of what a layer's norms and products put out. Under ZeRO 3, whose weights go, values and turned heads stay."""
    config = dataclasses.replace(example_config("llama"), qkv_bias=False)  # values with a bias are kept
    model, rows = build(config, 0), packed_rows(config.vocab_size, 0, [[20]])
    apply_recompute(model, mode, weights_stay=weights_stay)
    watched = (*DROPPED["feed_forward"], *DROPPED["selective"])
    put_out, turned = put_out_by(model.layers["0"], watched)
    output = model(rows.tokens_BS, rows.context(), rows.tokens_BS)
    gone = gone_of(put_out)
    assert set(put_out) == set(watched)
    values = {"attention.v"} if mode == "selective" and not weights_stay else set()
    assert DROPPED[mode] - values <= gone and not values & gone
    assert gone_of(turned) == (set(turned) if mode == "selective" and weights_stay else set()) and len(turned) == 2
    if mode == "none":
        assert not {"attention_norm", "feed_forward_norm", "feed_forward.gate"} & gone
    assert output.loss is not None


PutOut = dict[str, weakref.ref[torch.UntypedStorage]]


def put_out_by(layer: nn.Module, watched: Iterable[str]) -> tuple[PutOut, PutOut]:
    """The memory of what the layer's modules of these names will put out, and of its heads once turned, in order."""
    put_out, turned, attention = PutOut(), PutOut(), layer.attention
    assert isinstance(attention, Attention)
    turn = attention.turned

    def seen(*given: Any) -> Tensor:
        made = turn(*given)
        turned[str(len(turned))] = weakref.ref(made.untyped_storage())
        return made

    attention.turned = seen  # type: ignore[method-assign]
    for name in watched:
        layer.get_submodule(name).register_forward_hook(
            lambda _, __, made, name=name: put_out.__setitem__(name, weakref.ref(made.untyped_storage()))
        )
    return put_out, turned


def gone_of(put_out: PutOut) -> set[str]:
    """The names of those that are freed."""
    return {name for name, storage in put_out.items() if storage() is None}


@pytest.mark.parametrize(("family", "multiplied_again"), [("mixtral", False), ("gpt_oss", True)])
def test_a_layer_multiplies_gates_again_instead_of_queries(family: FamilyName, multiplied_again: bool) -> None:
    """Where experts go one after another: not gpt-oss's, which have biases. Gradients are the same, bit for bit."""
    config = dataclasses.replace(example_config(family), qkv_bias=False)
    rows, plain, model = packed_rows(config.vocab_size, 0, [[20]]), build(config, 0), build(config, 0)
    apply_recompute(model, "selective")
    layer = model.layers["0"]
    put_out, turned = put_out_by(layer, DROPPED["selective"])
    kept = list[Tensor]()
    with saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
        outputs = [each(rows.tokens_BS, rows.context(), rows.tokens_BS) for each in (model, plain)]
    gone = gone_of(put_out)
    assert {"attention_norm", "feed_forward_norm", "attention.q", "attention.k"} <= gone
    assert ("attention.v" in gone) == multiplied_again
    assert gone_of(turned) == (set(turned) if multiplied_again else set()) and len(turned) == 2
    for output in outputs:
        assert output.loss is not None
        output.loss.backward()
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_half_of_the_activations_of_experts_stay(precision: str) -> None:
    """Of the benchmark's model, as a run computes it, by the benchmark's own processes: nearly half, and no more."""
    kept = {
        mode: recomputation.bytes_of("experts", mode, "--precision", precision)["activations"]
        for mode in ("none", "selective")
    }
    assert 0.49 < kept["selective"] / kept["none"] <= 0.5


@pytest.mark.parametrize("mode", ["selective", "feed_forward"])
def test_a_layer_lists_its_weights_once_a_pass(monkeypatch: pytest.MonkeyPatch, mode: Recompute) -> None:
    """Not for each tensor that it saves: of experts that took 0.6 ms of the host a layer, 34 us a tensor."""
    model = build(example_config("qwen3_moe"), 0)
    apply_recompute(model, mode)
    parameters, asked = nn.Module.parameters, []

    def counted(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        asked.append(self)
        return parameters(self, recurse)

    monkeypatch.setattr(nn.Module, "parameters", counted)
    rows = packed_rows(8, 0, [[5, 3]])
    model(rows.tokens_BS, rows.context(), rows.tokens_BS)
    assert len(asked) == len(model.layers)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_rows_of_experts_are_picked_again(monkeypatch: pytest.MonkeyPatch, mode: Recompute) -> None:
    """Where experts are multiplied together, as on a GPU: here because they have biases. Gradients are the same."""
    config = example_config("gpt_oss")
    rows, picked = packed_rows(config.vocab_size, 0, [[20]]), list[weakref.ref[torch.UntypedStorage]]()
    pick = experts.to_rows_twice

    def seen(*arguments: Tensor, **ways: object) -> tuple[Tensor, Tensor]:
        made = pick(*arguments, **ways)
        picked.append(weakref.ref(made[0].untyped_storage()))
        return made

    monkeypatch.setattr(experts, "to_rows_twice", seen)
    plain, model = build(config, 0), build(config, 0)
    apply_recompute(model, mode)
    outputs = [each(rows.tokens_BS, rows.context(), rows.tokens_BS) for each in (plain, model)]
    n_layers = config.n_layers
    assert [each() is None for each in picked] == [False] * n_layers + [mode == "selective"] * n_layers
    for output in outputs:
        assert output.loss is not None
        output.loss.backward()
    assert len(picked) == (3 if mode == "selective" else 2) * n_layers
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("mode", ["feed_forward", "full"])
@pytest.mark.parametrize("is_part", [False, True])
def test_a_router_whose_scores_come_out_otherwise_the_second_time_chooses_alike(
    monkeypatch: pytest.MonkeyPatch, mode: Recompute, is_part: bool
) -> None:
    """``is_part``: between layers a rank holds a part of the positions, as under tp; here it is the whole."""
    config = example_config("mixtral")
    rows, choose, n_chosen = packed_rows(config.vocab_size, 0, [[20]]), Router.choose, 0

    def other_the_second_time(router: Router, scores_TE: Tensor) -> Tensor:
        nonlocal n_chosen
        n_chosen += 1
        return choose(router, scores_TE if n_chosen <= 2 * config.n_layers else -scores_TE)

    monkeypatch.setattr(Router, "choose", other_the_second_time)
    plain, model = build(config, 0), build(config, 0)
    apply_recompute(model, mode)
    for each in (plain, model):
        context = rows.context()
        context.part = rows.context() if is_part else None
        loss = each(rows.tokens_BS, context, rows.tokens_BS).loss
        assert loss is not None
        loss.backward()
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), model.parameters(), strict=True)
    )


ENDS_WITH_THE_EXPERTS: list[tuple[FamilyName, dict[str, object], bool, bool]] = [
    ("qwen3_moe", {}, False, True),
    ("qwen3_moe", {}, True, False),  # padding is put back behind them
    ("glm4_moe", {}, False, False),  # a shared expert behind them
    ("mixtral", {"norm_placement": "post"}, False, False),
    ("mixtral", {"norm_placement": "both"}, False, False),
    ("mixtral", {"residual_dropout": 0.5}, False, False),
]


@pytest.mark.parametrize("mode", ["feed_forward", "full"])
@pytest.mark.parametrize(("family", "changed", "has_padding", "ends"), ENDS_WITH_THE_EXPERTS)
def test_a_second_run_ends_before_experts_that_nothing_waits_for(
    monkeypatch: pytest.MonkeyPatch,
    family: FamilyName,
    changed: dict[str, Any],
    has_padding: bool,
    ends: bool,
    mode: Recompute,
) -> None:
    """Experts that go one after another multiply what they need again in their own backward pass, and only there."""
    config = dataclasses.replace(example_config(family), **changed)
    rows, computed = packed_rows(config.vocab_size, 0, [[7, 1, 12]]), list[int]()
    context = dataclasses.replace(rows.context(), has_padding=has_padding)
    kept, has = list[bool](), GatesAndUps.has
    monkeypatch.setattr(GatesAndUps, "has", lambda self, expert: kept.append(has(self, expert)) or kept[-1])
    compute = expert_turns.sums_by_turn
    monkeypatch.setattr(expert_turns, "sums_by_turn", lambda *given: computed.append(1) or compute(*given))
    plain, model = build(config, 0), build(config, 0)
    apply_recompute(model, mode)
    passes = []
    for each in (plain, model):
        computed.clear()
        kept.clear()
        loss = each(rows.tokens_BS, context, rows.tokens_BS).loss
        assert loss is not None
        loss.backward()
        passes.append(len(computed))
    assert passes == [passes[0], passes[0] * (1 if ends else 2)] and passes[0] > 0
    assert set(kept) == {not ends}
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(plain.parameters(), model.parameters(), strict=True)
    )


def test_planted_experts_that_are_never_computed_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    config = example_config("qwen3_moe")
    rows, expected = packed_rows(config.vocab_size, 0, [[20]]), build(config, 0)
    model = build(config, 0)
    apply_recompute(model, "full")
    monkeypatch.setattr(expert_turns, "sums_by_turn", lambda hidden_TD, *given: torch.zeros_like(hidden_TD))
    losses = []
    for each in (model, expected):
        losses.append(each(rows.tokens_BS, rows.context(), rows.tokens_BS).loss)
        monkeypatch.undo()
    assert abs(losses[0] - losses[1]) > 1e-4
