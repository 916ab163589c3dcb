"""What is computed while gradients by hidden states are summed over tp; nobody reads a sum before it is there."""

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel.tensor_overlap as tensor_overlap
from launcher.config.layout_rules import with_switches
from launcher.config.tree import RunConfig
from launcher.prove.matrix import fit, layouts
from launcher.prove.shrink import SMALL_SIZES
from modeling.config import ModelConfig
from modeling.context import Context
from modeling.decoder import Decoder, build_decoder
from modeling.kernels.fp8 import Fp8Products
from modeling.kernels.products import AS_THEY_ARE, Products
from modeling.precision import multiply_by
from parallel.collectives import SequenceGather
from parallel.config import ParallelConfig
from parallel.mesh import Axis
from parallel.offload import AtOnce, offloader_of
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, splits_backward
from parallel.recompute import Recompute, apply_recompute
from parallel.tensor import apply_tensor_parallelism
from parallel.tensor_overlap import overlap_sums
from small_models import example_config, packed_rows

AXIS = Axis(0, 2, (0, 1), None)  # no group: nothing is sent
FAMILIES = {
    "norms of heads": example_config("qwen3"),
    "biases, no gate": example_config("gpt2"),
    "latents": dataclasses.replace(example_config("deepseek_v3"), moe=None, mtp=None),
    "parallel blocks": dataclasses.replace(example_config("gpt2"), parallel_block=True),
}
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "feed_forward", "full")


class Arriving:
    """In place of collectives: a sum comes when it is waited for, and is no number before.

    The other rank has the same hidden states, and half our gradients.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        monkeypatch.setattr(dist, "all_gather_into_tensor", self.gather)
        monkeypatch.setattr(dist, "reduce_scatter_tensor", self.scatter)

    def gather(self, result: Tensor, given: Tensor, group: Any) -> None:
        result.copy_(torch.cat([given, given]))

    def scatter(self, result: Tensor, given: Tensor, group: Any, async_op: bool = False) -> Any:
        came = given.chunk(2)[0] * 1.5
        if not async_op:
            result.copy_(came)
            self.events.append("sum")
            return None
        result.fill_(torch.nan)
        self.events.append("begin")
        held = weakref.ref(given)

        def end() -> None:
            assert held() is not None, "the memory that a collective reads was let go of"
            result.copy_(came)
            self.events.append("wait")

        return Work(end)


class Work:
    """One reduce-scatter under way."""

    def __init__(self, end: Callable[[], Any]) -> None:
        self.wait = end


def layers(config: ModelConfig, overlap: bool, products: Products = AS_THEY_ARE, dtype=torch.float32) -> Decoder:
    """A decoder's layers, as a rank of tp has them but with all heads and channels."""
    whole = build_decoder(config)
    model = whole.part_of(range(config.n_layers), has_embedding=False, has_head=False)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    model.to(dtype)
    multiply_by(model, products)
    apply_tensor_parallelism(model, AXIS)
    if overlap:
        overlap_sums(model, AXIS)
    return model


def passes(model: Decoder, events: list[str]) -> list[Tensor]:
    """The output and every gradient; notes when each weight's gradient is there."""
    rows = packed_rows(64, 0, [[9, 7], [16]])
    context = Context(positions_BS=rows.positions_BS, documents_BS=rows.documents_BS)
    width = model.own_layers[0].attention.o.weight.shape[0]
    dtype = next(model.parameters()).dtype
    hidden_BSD = torch.randn(2, 8, width, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    for name, weight in model.named_parameters():
        weight.register_hook(lambda _, name=name: events.append(name))
    out_BSD = hidden_BSD
    for layer in model.own_layers:
        out_BSD, _ = layer(out_BSD, context)
    events.clear()
    out_BSD.float().square().sum().backward()
    return [out_BSD, hidden_BSD.grad, *(weight.grad for weight in model.parameters())]  # type: ignore[list-item]


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) > 8 and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_gradients_are_computed_while_the_sum_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Those of the weights that read what was gathered, and no others. Bit for bit the same."""
    there = Arriving(monkeypatch)
    model = layers(FAMILIES[family], overlap=True)
    found = passes(model, there.events)
    events, behind = "\n".join(there.events).split("begin"), set()
    for each in events[1:]:
        assert each.count("wait") == 1
        behind |= set(each.split("wait")[0].split())
    readers = {
        f"{name}.{own}"
        for name, module in model.named_modules()
        for own, _ in module.named_parameters(recurse=False)
        if name.rsplit(".", 1)[-1] in ("q", "k", "v", "q_a", "kv_a", "gate", "up")
    }
    assert behind == readers and "sum" not in there.events
    assert len(events) == 1 + 2 * len(model.own_layers)
    plain = layers(FAMILIES[family], overlap=False)
    wanted = passes(plain, there.events)
    assert "begin" not in there.events and there.events.count("sum") == 2 * len(model.own_layers)
    assert equal(found, wanted) and all(each.isfinite().all() for each in found)


@pytest.mark.parametrize("offloads", [False, True], ids=["stays", "offloads"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("family", ["norms of heads", "biases, no gate"])
def test_with_each_recomputation(
    monkeypatch: pytest.MonkeyPatch, family: str, recompute: Recompute, offloads: bool
) -> None:
    """The second run makes a graph of its own, which nobody differentiates."""
    there = Arriving(monkeypatch)
    found, wanted = (layers(FAMILIES[family], overlap=overlap) for overlap in (True, False))
    for model in (found, wanted):
        offloader = offloader_of(model, AtOnce(), SMALL_SIZES) if offloads else None
        apply_recompute(model, recompute, offloader=offloader)
    assert equal(passes(found, there.events), passes(wanted, there.events))


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    ("products", "dtype"),
    [(AS_THEY_ARE, torch.bfloat16), (AS_THEY_ARE, torch.float16), (Fp8Products(), torch.bfloat16)],
    ids=["bf16", "fp16", "fp8"],
)
def test_in_each_precision(
    monkeypatch: pytest.MonkeyPatch, products: Products, dtype: torch.dtype, recompute: Recompute
) -> None:
    there = Arriving(monkeypatch)
    each = [layers(FAMILIES["biases, no gate"], overlap, products, dtype) for overlap in (True, False)]
    for model in each:
        apply_recompute(model, recompute)
    assert equal(*(passes(model, there.events) for model in each))


def test_planted_reading_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Arriving(monkeypatch)

    def too_early(self: SequenceGather) -> Tensor:
        assert self.under_way is not None
        (_, _, result), self.under_way = self.under_way, None
        return result

    monkeypatch.setattr(SequenceGather, "wait", too_early)
    out_BSD, grad_BSD, *_ = passes(layers(FAMILIES["norms of heads"], overlap=True), there.events)
    assert out_BSD.isfinite().all() and not grad_BSD.isfinite().all()


def test_planted_memory_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the collective reads is held until the wait."""
    there = Arriving(monkeypatch)
    start = SequenceGather.start

    def letting_go(self: SequenceGather, grad_BSD: Tensor) -> None:
        start(self, grad_BSD)
        assert self.under_way is not None
        work, _, result = self.under_way
        self.under_way = work, result, result

    monkeypatch.setattr(SequenceGather, "start", letting_go)
    with pytest.raises(AssertionError, match="let go of"):
        passes(layers(FAMILIES["norms of heads"], overlap=True), there.events)


def test_planted_nodes_made_after_the_gathers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then autograd comes to the weights before the reduce-scatter begins, and nothing is behind it."""
    there = Arriving(monkeypatch)

    def gather(self: tensor_overlap.OverlappedPositions, hidden_BSD: Tensor) -> Tensor:
        gather = SequenceGather(self.axis)
        whole_BSD, self.readers, readers = gather.end(gather.begin(hidden_BSD)), (), self.readers
        for reader in readers:
            left = tensor_overlap.Left(reader.products)
            weights = (reader.weight,) if reader.bias is None else (reader.weight, reader.bias)
            self.late[reader.weight] = tensor_overlap._LateWeights.apply(left, *weights), left
        self.readers = readers
        return whole_BSD

    monkeypatch.setattr(tensor_overlap.OverlappedPositions, "gather", gather)
    passes(layers(FAMILIES["norms of heads"], overlap=True), there.events)
    places = [place for place, event in enumerate(there.events) if event == "begin"]
    assert places and all(there.events[place + 1] == "wait" for place in places)


def test_without_gradients_it_only_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Arriving(monkeypatch)
    each = [layers(FAMILIES["norms of heads"], overlap) for overlap in (True, False)]
    rows = packed_rows(64, 0, [[9, 7], [16]])
    hidden_BSD = torch.randn(2, 8, FAMILIES["norms of heads"].d_model)
    with torch.no_grad():
        made = []
        for model in each:
            context = Context(positions_BS=rows.positions_BS, documents_BS=rows.documents_BS)
            made.append(model.own_layers[0](hidden_BSD, context)[0])
    assert torch.equal(*made) and set(there.events) == {"sum"}


def test_nothing_is_held_after_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the hidden states nor the gradients that products leave."""
    there = Arriving(monkeypatch)
    left: list[tensor_overlap.Left] = []
    make = tensor_overlap.Left.__init__
    monkeypatch.setattr(tensor_overlap.Left, "__init__", lambda self, *given: left.append(self) or make(self, *given))
    model = layers(FAMILIES["norms of heads"], overlap=True)
    passes(model, there.events)
    assert len(left) == 5 * len(model.own_layers) and all(each.held is None for each in left)
    blocks = [block.positions for layer in model.own_layers for block in (layer.attention, layer.feed_forward)]  # type: ignore[union-attr]
    assert all(isinstance(each, tensor_overlap.OverlappedPositions) and each.late == {} for each in blocks)


def test_it_is_left_out_where_it_cannot_be():
    """By whoever goes through layouts: other stages of ZeRO, other schedules."""
    given = ParallelConfig(tp=2, pp=2, tp_overlap=True)
    for change in ({"zero": 2}, {"pipeline": Interleaved()}, {"pipeline": ZBV(), "pp": 1}):
        layout = dataclasses.replace(given, **change)
        assert with_switches(layout, given, None) == layout
    for change in ({"zero": 3}, {"pipeline": ZBV()}, {"pipeline": DualPipeV()}):
        layout = dataclasses.replace(given, **change)
        assert with_switches(layout, given, None) == dataclasses.replace(layout, tp_overlap=False)


def test_a_matrix_proves_it_where_it_can_be():
    plain = RunConfig()
    config = dataclasses.replace(plain, parallel=ParallelConfig(tp_overlap=True))
    for layout in itertools.islice(layouts(), 0, None, 7):
        small, refused = fit(config, layout)
        assert refused == fit(plain, layout)[1]
        parallel = layout.parallel
        assert small.parallel.tp_overlap == (parallel.zero < 3 and not splits_backward(parallel.pipeline))
