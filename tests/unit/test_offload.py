"""Activations on the host between the passes: equal gradients however late copies are, and memory that is kept."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallel.offload as offload
from late_copies import Late
from launcher.estimate.ledger import Ledger
from modeling.config import ModelConfig
from modeling.context import Context
from modeling.decoder import Decoder
from modeling.kernels.scratch import Scratch
from parallel.offload import (
    AtOnce,
    Copies,
    Mark,
    Offloader,
    OnStreams,
    Pairs,
    Pool,
    Room,
    Slot,
    offloader_of,
    storages_in,
)
from parallel.recompute import Recompute, apply_recompute, offloader_in
from parallel.remake import HeldWeight, storage_of
from parallel.sizes import Sizes
from small_models import LENGTHS, Rows, build, example_config, next_tokens, packed_rows
from stream_races import Races

SIZES = Sizes(page_bytes=1 << 10, least_offloaded_bytes=256)
N_LAYERS = 5
MODES: tuple[Recompute, ...] = ("none", "selective", "feed_forward", "full")


def config_of(family: Any) -> ModelConfig:
    return replace(example_config(family), n_layers=N_LAYERS)


def offloaded(config: ModelConfig, recompute: Any, copies: Copies) -> tuple[Decoder, Offloader]:
    """A model whose activations go to the host."""
    model = build(config, 0)
    offloader = Offloader(copies, SIZES, stays=max(map(int, model.layers)))
    apply_recompute(model, recompute, offloader=offloader)
    return model, offloader


def gradients(model: Decoder, rows: Rows) -> list[Tensor]:
    """The loss, and each weight's gradient."""
    model.zero_grad()
    loss = model(rows.tokens_BS, rows.context(), next_tokens(rows)).loss
    assert loss is not None
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def rows_of(config: ModelConfig) -> Rows:
    return packed_rows(config.vocab_size, 0, LENGTHS)


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_gradients_are_the_same_however_late_copies_are(family: Any, recompute: Recompute) -> None:
    """Bit for bit, in two steps, of which the second one takes no new memory of the host."""
    config = config_of(family)
    rows, plain = rows_of(config), gradients(build(config, 0), rows_of(config))
    for copies in (AtOnce(), Late()):
        model, offloader = offloaded(config, recompute, copies)
        pages = set[int]()
        for _ in range(2):
            assert all(map(torch.equal, gradients(model, rows), plain))
            pages.add(offloader.pool.n_pages)
            assert len(offloader.pool.free) == offloader.pool.n_pages
        assert len(pages) == 1 and 0 not in pages
        assert isinstance(copies, AtOnce) or copies.n_late == 2 * 2 * (N_LAYERS - 1)


def test_layers_that_recompute_each_in_its_own_way() -> None:
    config = config_of("glm4_moe")
    rows, plain = rows_of(config), gradients(build(config, 0), rows_of(config))
    modes = ("full", "none", "selective", "none", "feed_forward", *["none" for _ in config.mtp_layers])
    model, _ = offloaded(config, modes, Late())
    assert all(map(torch.equal, gradients(model, rows), plain))


@pytest.mark.parametrize("way", ["send", "fetch"])
def test_planted_computation_that_does_not_wait_for_a_copy_is_seen(way: str) -> None:
    """Memory that is let go before it was copied, and memory that is read before it was filled."""
    config = config_of("llama")
    plain = gradients(build(config, 0), rows_of(config))
    model, _ = offloaded(config, "none", Late(waits={"send", "fetch"} - {way}))
    assert not all(map(torch.equal, gradients(model, rows_of(config)), plain))


def in_two_parts(layers: list[nn.Module], embedded_BSD: Tensor, contexts: list[Context]) -> list[Tensor]:
    """Gradients of a micro-batch whose backward pass stops half way, while another one goes forward."""
    hidden = [embedded_BSD.detach().requires_grad_()]
    for layer in layers:
        hidden.append(layer(hidden[-1], contexts[0])[0])
    (grad_BSD,) = torch.autograd.grad(hidden[-1].square().sum(), hidden[3], retain_graph=True)
    other_BSD = 2 * embedded_BSD.detach()
    for layer in layers:
        other_BSD = layer(other_BSD, contexts[1])[0]
    weights = [weight for layer in layers[:3] for weight in layer.parameters()]
    found = torch.autograd.grad(hidden[3], [hidden[0], *weights], grad_BSD)
    return [*found, other_BSD.detach()]


def both_parts(copies: Copies | None) -> list[Tensor]:
    config = config_of("llama")
    model = build(config, 0) if copies is None else offloaded(config, "none", copies)[0]
    rows = rows_of(config)
    return in_two_parts(list(model.layers.values()), model.embed(rows.tokens_BS), [rows.context(), rows.context()])


def test_pages_are_written_when_what_lay_in_them_has_come_back() -> None:
    plain = both_parts(None)
    assert all(map(torch.equal, both_parts(Late()), plain))


def test_planted_page_that_is_used_again_too_early_is_seen() -> None:
    plain = both_parts(None)
    assert not all(map(torch.equal, both_parts(Late(orders=False)), plain))


class OnCpu(OnStreams):
    """The streams' own code, over tensors of a CPU."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def page(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)


class NeverWaits(OnCpu):
    def wait(self, mark: Mark) -> None:
        pass


class BeginsAtOnce(OnCpu):
    def copy(self, stream: Any, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        for mark in after:
            stream.wait_event(mark)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()


class WritesPagesAtOnce(OnCpu):
    def send(self, pairs: Pairs, after: Sequence[Mark]) -> Mark:
        return super().send(pairs, ())


@cache
def races_of(copies: type[OnCpu], recompute: Recompute = "none", family: Any = "llama") -> Races:
    """What nothing keeps in order in a step, and in passes of which one stops half way."""
    config, races = config_of(family), Races()
    rows = rows_of(config)
    with races.streams():
        model, _ = offloaded(config, recompute, copies())
        gradients(model, rows)
        both_parts(copies())
    return races


@pytest.mark.parametrize(("family", "recompute"), [("llama", "none"), ("llama", "full"), ("glm4_moe", "selective")])
def test_streams_keep_an_order(family: Any, recompute: Recompute) -> None:
    """Copies and computation on the same memory, and memory that the allocator takes back."""
    races = races_of(OnCpu, recompute, family)
    assert races.found == []
    assert len(races.operations) == 1 + 2 * 2  # copies really went on streams of their own


@pytest.mark.parametrize(
    ("copies", "told"),
    [
        (NeverWaits, "does not wait for copy_ on stream 2"),
        (NeverWaits, "memory of cpu is free before copy_ on stream 1"),
        (BeginsAtOnce, "copy_ on stream 1 does not wait for"),
        (WritesPagesAtOnce, "copy_ on stream 3 does not wait for copy_ on stream 4"),
    ],
)
def test_planted_streams_out_of_order_are_seen(copies: type[OnCpu], told: str) -> None:
    assert any(told in each for each in races_of(copies).found)


def test_weights_stay_where_they_are() -> None:
    """Their memory may come and go between the passes, as under ZeRO 3; nothing of them is copied."""
    config = config_of("llama")
    plain = gradients(build(config, 0), rows_of(config))
    model, _ = offloaded(config, "none", AtOnce())
    rows = rows_of(config)
    loss = model(rows.tokens_BS, rows.context(), next_tokens(rows)).loss
    assert loss is not None
    for weight in model.layers.parameters():
        there = weight.data
        weight.data = there.clone()
        there.fill_(float("nan"))
    loss.backward()
    assert all(map(torch.equal, [loss.detach(), *(weight.grad for weight in model.parameters())], plain))


def written_to(model: Decoder, rows: Rows) -> list[Tensor]:
    """Gradients where a layer's weights change between the passes."""
    loss = model(rows.tokens_BS, rows.context(), next_tokens(rows)).loss
    assert loss is not None
    with torch.no_grad():
        model.layer_of("1").feed_forward.down.weight.mul_(2)  # type: ignore[union-attr]
    loss.backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def test_planted_weight_that_has_changed_by_the_backward_pass_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd itself does. Unchecked, the later value would make other gradients."""
    config = config_of("llama")
    rows = rows_of(config)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written_to(build(config, 0), rows)
    with pytest.raises(AssertionError, match="a weight was written to"):
        written_to(offloaded(config, "none", AtOnce())[0], rows)
    monkeypatch.setattr(HeldWeight, "restore", lambda self: self.view.of(self.weight.detach()))
    found = written_to(offloaded(config, "none", AtOnce())[0], rows)
    assert not all(map(torch.equal, found, gradients(build(config, 0), rows)[1:]))


def test_planted_activation_that_is_taken_for_a_weight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be read again from where it lay, whatever lies there by then."""
    config = config_of("llama")
    rows, plain = rows_of(config), gradients(build(config, 0), rows_of(config))
    model, _ = offloaded(config, "none", AtOnce())
    first = model.layer_of("0").feed_forward
    inputs: list[Tensor] = []
    first.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    held_weight = offload.held_weight

    def mistaken(weights: Sequence[nn.Parameter], tensor: Tensor) -> HeldWeight | None:
        if inputs and storage_of(tensor) == storage_of(inputs[0]):
            return HeldWeight(nn.Parameter(tensor), offload.View(tuple(tensor.shape), tensor.stride(), 0), 0)
        return held_weight(weights, tensor)

    monkeypatch.setattr(offload, "held_weight", mistaken)
    loss = model(rows.tokens_BS, rows.context(), next_tokens(rows)).loss
    assert loss is not None
    inputs[0].data.fill_(0.5)  # as whoever takes freed memory
    loss.backward()
    assert not all(map(torch.equal, [weight.grad for weight in model.parameters()], plain[1:]))


def slot_of(copies: Copies, sizes: Sizes = SIZES) -> Slot:
    return Slot(Offloader(copies, sizes), nn.Linear(2, 2), None)


def test_memory_that_several_tensors_share_goes_once() -> None:
    """A tensor saved twice, parts of a product, and a transposed one; they come back as they lay."""
    slot, both = slot_of(Late()), torch.arange(2048.0).view(16, 128)
    saved = [both, both, *both.chunk(2, 1), both.t(), both[3:5]]
    kept, wanted = [slot.keep(each) for each in saved], [each.clone() for each in saved]
    strides = [each.stride() for each in saved]
    slot.send(frozenset())
    assert len(slot.held()) == 1 and len(slot.pages) == both.nbytes // SIZES.page_bytes == 8
    del saved, both
    slot.leave()
    found = [each.restore() for each in kept]
    assert all(map(torch.equal, found, wanted)) and [each.stride() for each in found] == strides


def test_what_is_not_worth_its_way_stays() -> None:
    slot, shared = slot_of(AtOnce()), torch.ones(400)
    stays = [torch.ones(10), torch.ones(400, dtype=torch.int64), slot.weights[0]]
    assert [type(slot.keep(each)).__name__ for each in stays] == ["Tensor", "Tensor", "HeldWeight"]
    kept = slot.keep(shared), slot.keep(torch.ones(400, dtype=torch.bool))
    slot.send(frozenset([storage_of(shared)]))
    slot.leave()
    assert [each.memory.flat is None for each in kept] == [False, True]
    assert all(each.restore().bool().all() for each in kept)


def test_a_contexts_tensors_are_found() -> None:
    """Masks and rotations, which all layers of a micro-batch share: with what the first layer has made."""
    config = config_of("llama")
    rows, model = rows_of(config), build(config, 0)
    context = rows.context()
    before = set(storages_in(context))
    model(rows.tokens_BS, context, next_tokens(rows))
    tables = [each for tables in context.rope.values() for each in tables]
    assert tables and {storage_of(each) for each in tables} <= set(storages_in(context)) - before


def test_rows_whose_number_varies_take_no_more_memory_than_the_most_at_once() -> None:
    pool = Pool(AtOnce(), 1 << 10)
    generator = torch.Generator().manual_seed(0)
    most = 0
    for _ in range(200):
        rooms = [Room(pool) for _ in range(3)]
        for room in rooms:
            for size in torch.randint(1, 5000, (4,), generator=generator).tolist():
                assert sum(map(len, room.take(size))) == size
        most = max(most, sum(len(room.pages) for room in rooms))
        for room in rooms:
            pool.give(room.pages, None)
    assert pool.n_pages == most == len(pool.free)


@contextmanager
def no_collector() -> Iterator[None]:
    """Training switches Python's off: what only it would find stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("recompute", MODES)
def test_a_graph_that_no_pass_has_freed_gives_all_back(recompute: Recompute) -> None:
    config = config_of("llama")
    rows, late = rows_of(config), Late()
    model, offloader = offloaded(config, recompute, late)
    gradients(model, rows)
    with no_collector():
        output = model(rows.tokens_BS, rows.context(), next_tokens(rows))
        assert output.loss is not None and len(offloader.pool.free) < offloader.pool.n_pages
        hidden = model.layer_of("4").feed_forward_norm.weight
        torch.autograd.grad(
            output.loss, hidden, retain_graph=True
        )  # sends for the layers before, which nobody asks for
        del output
        assert len(offloader.pool.free) == offloader.pool.n_pages
    assert not any(late.queues.values())


def on_the_device(model: Decoder) -> int:
    """Bytes that layers have left on the device when the head begins: on a CPU, all but the host's pages."""
    offloader = offloader_in(model)
    found: list[int] = []

    def look(*_: Any) -> None:
        found.append(ledger.total - before - (0 if offloader is None else offloader.pool.n_bytes))

    rows = packed_rows(model.embed.weight.shape[0], 0, [[64]] * 2)
    with pytest.MonkeyPatch.context() as patch, Ledger() as ledger:
        patch.setattr(Scratch, "take", lambda self, name, shape, like: like.new_empty(shape))
        for weight in model.parameters():
            ledger.see(weight.data, "weights")
        before = ledger.total
        with model.head.register_forward_pre_hook(look):
            gradients(model, rows)
    return found[0]


@pytest.mark.parametrize("recompute", MODES)
def test_activations_leave_the_device(recompute: Recompute) -> None:
    """Of six layers the last one's stay, and of the others what is small or counts something."""
    config = replace(example_config("llama"), n_layers=6)
    plain = build(config, 0)
    apply_recompute(plain, recompute)
    one = replace(config, n_layers=1)
    least = build(one, 0)
    apply_recompute(least, recompute)
    model = build(config, 0)
    apply_recompute(model, recompute, offloader=offloader_of(model, AtOnce(), SIZES))
    ours, theirs, lone = (on_the_device(each) for each in (model, plain, least))
    assert theirs > 1.5 * lone
    assert ours - lone < 0.1 * (theirs - lone)
