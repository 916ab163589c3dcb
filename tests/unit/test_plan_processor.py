"""`plan --as cpu`: what a step asks for, and what its seconds follow from."""

import json
import mmap
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from cpp_passes import NEEDS_COMPILER
from launcher.cli import main
from launcher.closed_form.bubble import waits_of
from launcher.config.load import load_config
from launcher.estimate.order import Passes, simulate
from launcher.processor import kernels
from launcher.processor.host import tiny_relative
from launcher.processor.ops import LEVELS, Amounts, Ask, StepRecorder, rough
from launcher.processor.rates import (
    Call,
    Machine,
    Message,
    merged,
    page_seconds,
    sent_bytes,
    slowest,
    typical,
    typical_call,
)
from launcher.processor.seconds import HOST, PRODUCTS, WIRES, step_seconds
from launcher.processor.shared import shared_seconds
from launcher.processor.timing import MOVED, RECENT_BYTES, typical_seconds
from launcher.processor.trace import as_rows, drawn, extended, from_rows
from launcher.trace.regions import Regions
from launcher.training import heap
from modeling.kernels import row_passes
from modeling.kernels.by_rows import rms_norm_by_rows
from modeling.kernels.experts import narrow_row_multiple
from modeling.kernels.stand_ins import OBSERVERS
from parallel.pipeline.config import ZBV, Interleaved, OneFOneB

CONFIG = """\
name: small
model: {n_layers: 2, d_model: 64, n_heads: 2, n_kv_heads: 2, d_ff: 128, vocab_size: 512}
data: {seq_len: 64, sources: [{path: none.txt}]}
train: {global_batch_size: 4}
"""
PRODUCT = Ask("forward", "product", "bf16", (64, 64, 64, 0, 1), "")
CALL = Ask("forward", "call", "", (), "")
SUM = Ask("update", "all-reduce", "fp32", (2,), "wire")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def machine_of(share=1.0):
    machine = Machine(cores=2, busy=2, share=share)
    machine.per_unit[PRODUCT._replace(phase="")] = 1e-9  # type: ignore[arg-type]
    machine.messages["all-reduce", "fp32", 2] = Message(1e-3, 1e-6)
    return machine


def test_a_step_is_its_products_its_calls_and_its_messages(path):
    found = {PRODUCT: Amounts(2, 1e9), CALL: Amounts(1000, 0.0), SUM: Amounts(1, 1e6)}
    config = load_config(path, [])
    seconds, (share,) = step_seconds(config, 2, [found], machine_of(), Call(wall=3e-5, processor=1e-5))
    assert share.parts() == pytest.approx({PRODUCTS: 1.0, HOST: 0.01, WIRES: 1.0})
    assert seconds == pytest.approx(2.01 + 0.02)  # a thousand calls wait for others as long as two of them compute
    crowded, _ = step_seconds(config, 2, [found], machine_of(share=0.5), Call(wall=3e-5, processor=1e-5))
    assert crowded == pytest.approx(2 * 1.0 + 0.03 + 1.0)  # messages and calls were timed in the crowd


def test_rates_of_several_rounds_are_the_median_of_each():
    rounds = []
    for factor in (1.0, 5.0, 2.0):
        machine = machine_of(share=factor / 10)
        machine.per_unit = {ask: factor * each for ask, each in machine.per_unit.items()}
        machine.messages = {key: Message(factor, 1 / factor) for key in machine.messages}
        rounds.append(machine)
    found = typical(rounds)
    assert found.share == 0.2 and list(found.per_unit.values()) == [2e-9]
    assert list(found.messages.values()) == [Message(2.0, 0.5)]
    assert typical_call([Call(1, 6), Call(3, 4), Call(2, 5)]) == Call(2, 5)
    assert slowest([Call(1.0, 6.0), Call(3.0, 4.0)]) == Call(3.0, 5.0)


def test_a_call_is_timed_in_the_configs_own_layout(path):
    config = load_config(path, ["parallel.tp=2", "parallel.zero=2", "train.recompute=full", "data.seq_len=4096"])
    tiny = tiny_relative(config, 2)
    assert (tiny.parallel, tiny.metrics, tiny.train.recompute) == (config.parallel, config.metrics, "full")
    assert tiny.data.seq_len < 100 and tiny.model.d_model < 64 and tiny.model.n_layers == config.model.n_layers


def test_a_pipeline_of_three_uneven_positions_is_planned(path):
    """Degrees above two, which a proof may lower, stay; a hop is a message within the pipeline's own group."""
    uneven = ["parallel.pp=3", "parallel.pipeline={name: 1f1b, layers: [1, 2, 2]}", "model.n_layers=5"]
    config = load_config(path, [*uneven, "train.global_batch_size=100", "train.precision=fp32"])
    tiny = tiny_relative(config, 3)
    assert tiny.parallel == config.parallel and tiny.train.batches.sizes[-1] == 6
    product = PRODUCT._replace(dtype="fp32")
    machine = Machine(cores=4, busy=3, share=1.0)
    machine.per_unit[product._replace(phase="")] = 1e-9  # type: ignore[arg-type]
    machine.messages["send", "fp32", 3] = Message(1e-3, 0.0)
    found = [{product: Amounts(1, 1e9)}] * 3
    seconds, _ = step_seconds(config, 3, found, machine, Call(0.0, 0.0))
    assert 1.0 < seconds < 1.2


@pytest.mark.slow
def test_any_number_of_processes_is_planned(path, capsys):
    """Three and six of them, whose shares of a message are not powers of two."""
    uneven = ["parallel.pp=3", "parallel.pipeline={name: 1f1b, layers: [1, 2, 2]}", "model.n_layers=5"]
    sizes = ["train.precision=fp32", "train.global_batch_size=12", "data.seq_len=96"]
    for ranks, layout in (("3", uneven), ("6", ["parallel.tp=2", "parallel.zero=3"])):
        assert main(["plan", str(path), "--as", "cpu", "--ranks", ranks, *sizes, *layout, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step_seconds"] > 0


@pytest.mark.parametrize("pipeline", [OneFOneB(), Interleaved(), ZBV()], ids=lambda each: each.name)
def test_with_a_core_for_each_a_pipeline_is_as_the_schedule_says(pipeline):
    passes = [Passes(1.0, 2.0, 0.1)] * 2
    order = simulate(pipeline, passes, 8)
    assert shared_seconds(pipeline, passes, 8, lambda busy: 1.0) == pytest.approx(max(order.ends))


def test_two_positions_on_one_core_take_the_sum_of_their_work():
    passes = [Passes(1.0, 2.0)] * 2
    one_core = shared_seconds(OneFOneB(), passes, 4, lambda busy: 1 / busy)
    assert one_core == pytest.approx(2 * 4 * 3.0)
    assert waits_of(OneFOneB(), 4, [3.0, 3.0]) > 0  # what waits leaves its core to the other: no bubble is left


def test_planted_share_that_waiting_processes_keep():
    """If those that wait kept their share, the same pipeline would take its bubble longer."""
    passes = [Passes(1.0, 2.0)] * 2
    kept = shared_seconds(OneFOneB(), passes, 4, lambda busy: 0.5)
    assert kept > 1.2 * shared_seconds(OneFOneB(), passes, 4, lambda busy: 1 / busy)


def test_further_micro_batches_ask_for_what_two_steps_differ_by():
    less, more = {PRODUCT: Amounts(2, 10.0), SUM: Amounts(1, 5.0)}, {PRODUCT: Amounts(5, 25.0), SUM: Amounts(1, 5.0)}
    assert extended(less, more, 3) == {PRODUCT: Amounts(11, 55.0), SUM: Amounts(1, 5.0)}


def test_what_is_asked_for_survives_json():
    found = {PRODUCT: Amounts(2, 1e9), SUM: Amounts(1, 1e6)}
    assert from_rows([list(row) for row in as_rows(found)]) == found


def test_the_recorder_counts_products_bytes_calls_and_new_pages():
    left, right = torch.ones(60, 70), torch.ones(100, 70)
    with StepRecorder(Regions()) as recorder:
        torch.mm(left, right.T)
        left.add_(1)
        torch.empty(128 << 20)  # 512 MiB that nobody writes to
        torch.zeros(96 << 20)  # 384 MiB, more than the heap has room for
    found = recorder.found()
    product = Ask("forward", "product", "fp32", (64, 64, 128, 0, 1), "")
    assert found[product] == Amounts(1, 2.0 * 60 * 70 * 100)
    assert found[Ask("forward", "add", "fp32", (), "near")].units == 2 * left.nbytes
    assert found[Ask("forward", "pages", "", (), "")].units == 384 << 20
    assert found[CALL].calls >= 4


def test_pages_fault_of_large_blocks_alone_that_the_heap_has_no_room_for():
    """By hand, in MiB: the heap has 256, and holds large blocks while they fit, and small ones always."""
    mib = (1 << 20) // 4
    pages = Ask("forward", "pages", "", (), "")
    with FakeTensorMode(), StepRecorder(Regions()) as recorder:
        kept = [torch.zeros(100 * mib), torch.zeros(100 * mib)]
        assert pages not in recorder.found()
        mapped = torch.zeros(100 * mib)
        assert recorder.found()[pages].units == 100 << 20
        mapped.zero_()  # its pages are there
        small = [torch.zeros(3 * mib) for _ in range(40)]  # the heap grows to 320
        kept.pop()
        room = [torch.zeros(95 * mib)]  # 315 of 320
        assert recorder.found()[pages].units == 100 << 20
        room.append(torch.zeros(8 * mib))
        assert recorder.found()[pages].units == 108 << 20
        del mapped, small
        room.append(torch.zeros(100 * mib))
        assert recorder.found()[pages].units == 108 << 20


def test_a_page_fault_takes_time_whatever_the_heap_holds():
    """Measured beside the heap: in it only the first of many tensors of a size faults."""
    heap.keep_heap_from_growing()
    nanoseconds = page_seconds() * mmap.PAGESIZE * 1e9
    assert nanoseconds > 50  # hundreds to thousands; memory that is there is written to at a few for a page


def normed_calls() -> dict[str, int]:
    """How often a norm of 8 rows and its gradients ask for each kind of work, by torch's operations."""
    rows, weight = torch.rand(8, 32, requires_grad=True), torch.ones(32, requires_grad=True)
    with StepRecorder(Regions()) as recorder:
        out = rms_norm_by_rows(rows, weight, norm_eps=1e-6, adds_one=False)
        torch.autograd.grad(out, (rows, weight), rows)
    return {ask.kind: calls for ask, (calls, _) in recorder.found().items() if ask.kind != "call"}


@pytest.mark.skipif(NEEDS_COMPILER is not None, reason=str(NEEDS_COMPILER))
def test_what_stands_in_for_a_kernel_counts_as_one_call_of_it(monkeypatch):
    assert normed_calls() == {"norm": 1, "norm_gradients": 1}
    assert not OBSERVERS
    monkeypatch.setattr(row_passes, "why_not", lambda: "there is no C++ compiler")
    assert {"sum", "add"} <= normed_calls().keys() and "norm" not in normed_calls()


@pytest.mark.skipif(NEEDS_COMPILER is not None, reason=str(NEEDS_COMPILER))
def test_planted_recorder_that_counts_what_stands_in_too(monkeypatch):
    never = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(StepRecorder, "in_kernel", never, raising=False)
    assert {"norm", "sum", "add"} <= normed_calls().keys()


def test_a_kernel_is_timed_with_as_many_bytes_as_its_level_has(monkeypatch):
    moved = []
    monkeypatch.setattr(kernels, "rows_seconds", lambda name, dtype, width, n_bytes: moved.append(n_bytes))
    for level in LEVELS:
        kernels.kernel_seconds("rotate", torch.float32, (64,), level)
    assert moved == [MOVED[level] for level in LEVELS] and moved == sorted(set(moved))


@pytest.mark.parametrize("rows", [32, 128, 512, 1024])
def test_timed_experts_leave_half_of_a_last_block_empty(rows):
    sizes = kernels.uneven_sizes(rows, torch.float32)
    assert sum(-(-size // kernels.BLOCK) for size in sizes) == len(sizes) * (rows / kernels.BLOCK + 0.5)
    padded, unit = kernels.uneven_sizes(rows, torch.bfloat16), narrow_row_multiple(rows)
    assert padded == [-(-size // unit) * unit for size in sizes]


@pytest.mark.parametrize("rows", [1, 2, 16])
def test_timed_experts_all_have_rows(rows):
    assert min(kernels.uneven_sizes(rows, torch.float32)) >= 1


def test_what_is_timed_writes_to_memory_that_was_freed_a_while_ago():
    alive, most = weakref.WeakSet[torch.Tensor](), []

    def work():
        made = torch.ones(RECENT_BYTES // 8 // 4)  # an eighth of it
        alive.add(made)
        most.append(len(alive))
        return made

    assert typical_seconds(work) > 0 and max(most) == 9


def test_choices_are_drawn_with_equal_chances():
    choices = drawn((4096, 8), 2)
    assert choices.shape == (4096, 2) and bool((choices[:, 0] != choices[:, 1]).all())
    counts = torch.bincount(choices.flatten(), minlength=8)
    assert len(counts.unique()) > 4 and counts.tolist() == pytest.approx([1024] * 8, rel=0.1)
    assert torch.equal(choices, drawn((4096, 8), 2))  # two traced steps differ by their micro-batches alone


def test_small_rules():
    assert [rough(each) for each in (1, 3, 90, 100, 256)] == [1, 4, 64, 128, 256]
    assert sent_bytes("all-reduce", 100, 2) == 100 and sent_bytes("send", 100, 2) == 100
    found: list[Mapping[str, Any]] = [{"per_unit": {PRODUCT: 1.0}, "messages": {}, "share": 1.0}]
    assert merged(2, 1, found).per_unit == {PRODUCT: 1.0}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--as", "h100"], "--as=h100 must be cpu"),
        (["--as", "cpu", "--gpus", "2"], "--gpus does not go together with --as=cpu"),
        (["--as", "cpu", "train.compile=on"], "train.compile=on has no plan on a processor"),
        (["--as", "cpu", "train.precision=fp16"], "train.precision=fp16 has no plan on a processor"),
        (["--ranks", "2"], "--ranks=2 is a number of this machine's processes"),
        (["--traces", "2"], "--traces=2 are of what --search has found"),
    ],
)
def test_refusals(path, capsys, arguments, told):
    assert main(["plan", str(path), *arguments]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.out == ""
