"""Schedules as drawn, the rules on them, and sums of gradients in 16 bits."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe

import parallel.pipeline.config as config
import parallel.pipeline.rules as rules
import parallel.pipeline.schedule as schedules
from modeling.config import ModelConfig
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB, chunks
from parallel.pipeline.draw import Durations, bubble_fraction, draw_text, peak_activations, timeline
from parallel.pipeline.rules import pipeline_problems, runs_micro_batches
from parallel.pipeline.schedule import Action, action_orders
from parallel.pipeline.stages import rank_parts
from parallel.zero.accumulation import PLAIN
from parallel.zero.reduction import GradientSums

SCHEDULES = [*config.SCHEDULES, Interleaved(n_chunks=3)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_rules_are_what_torch_runs(schedule, pp):
    """A number of micro-batches that the rules allow is planned, passes every stage, and never waits in a circle."""
    for count in range(1, 15):
        if not runs_micro_batches(schedule, pp, count):
            if schedule.name != "1f1b":
                with pytest.raises(ValueError, match="microbatches"):
                    action_orders(schedule, pp, count)
            continue
        orders = action_orders(schedule, pp, count)
        spans = timeline(orders, Durations())
        assert 0.0 <= bubble_fraction(spans) < 1.0
        done = [action for order in orders for action in order]
        assert len(done) == len(set(done))
        for stage in range(pp * chunks(schedule)):
            for number in range(count):
                assert Action("F", stage, number) in done
                split = {Action("I", stage, number), Action("W", stage, number)}
                assert (Action("B", stage, number) in done) != (split <= set(done))


def test_the_order_is_of_passes_alone(monkeypatch):
    """As torch's GPipe tells it: a sum of gradients at the end, which waits for no other action."""
    monkeypatch.setattr(schedules, "build_schedule", lambda config, stages, n, loss: ScheduleGPipe(stages[0], n))
    orders = action_orders(ZBV(), 2, 2)
    assert orders == [[Action(kind, rank, n) for kind in "FB" for n in range(2)] for rank in range(2)]


@pytest.mark.parametrize(("pp", "count"), [(2, 2), (2, 9), (4, 8), (8, 32)])
def test_1f1b_has_the_bubble_and_the_peak_of_its_closed_form(pp, count):
    orders = action_orders(OneFOneB(), pp, count)
    assert bubble_fraction(timeline(orders, Durations())) == pytest.approx((pp - 1) / (count + pp - 1))
    assert [peak_activations(order) for order in orders] == [pp - rank for rank in range(pp)]


def test_interleaving_divides_the_bubble_by_its_chunks():
    """Narayanan et al. 2021, section 2.2: bubble time over ideal time is (pp - 1) / (chunks x micro-batches)."""
    for n_chunks in (2, 3, 4):
        fraction = bubble_fraction(timeline(action_orders(Interleaved(n_chunks=n_chunks), 4, 16), Durations()))
        assert fraction / (1 - fraction) == pytest.approx(3 / (n_chunks * 16))


def test_zero_bubble_schedules_have_less_bubble_at_the_same_memory():
    plain = bubble_fraction(timeline(action_orders(OneFOneB(), 4, 16), Durations()))
    for schedule in (ZBV(), DualPipeV()):
        orders = action_orders(schedule, 4, 16)
        assert bubble_fraction(timeline(orders, Durations())) < plain / 4
        assert max(peak_activations(order) for order in orders) <= 2 * 4 + 1
    assert [peak_activations(order) for order in action_orders(ZBV(), 4, 16)] == [8] * 4


def test_planted_circle_of_waiting_is_seen():
    orders = action_orders(OneFOneB(), 2, 2)
    orders[1].reverse()
    with pytest.raises(AssertionError, match="circle"):
        timeline(orders, Durations())


def test_drawn_as_text():
    assert draw_text(OneFOneB(), 2, 2) == (
        "1f1b: pp=2, 2 micro-batches: bubble 33.3%, peak activations of ranks 0 to 1: 2, 1 micro-batches\n"
        "rank 0   0F0 0F1 .   .   0B0---- .   0B1----\n"
        "rank 1   .   1F0 1B0---- 1F1 1B1----\n"
    )


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved(), ZBV(), DualPipeV()], ids=str)
def test_documented_drawings_are_drawn(schedule):
    text = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    assert draw_text(schedule, 2, 4) in text


GOOD = {"pp": 2, "n_layers": 8, "zero": 1, "global_batch_size": 16, "micro_batch_size": 2, "dp": 2}
CASES = [
    (OneFOneB(), {}, None),
    (OneFOneB(layers=(3, 5)), {}, None),
    (ZBV(), {"pp": 1, "zero": 3, "n_layers": 1, "global_batch_size": 4}, None),
    (
        Interleaved(n_chunks=1),
        {},
        "parallel.pipeline.n_chunks=1 must be at least 2 with parallel.pipeline.name=interleaved; "
        "try 2, or parallel.pipeline.name=1f1b",
    ),
    (
        Interleaved(),
        {"n_layers": 3},
        "parallel.pp=2 with parallel.pipeline.name=interleaved makes 4 stages, which model.n_layers=3 must cover with "
        "at least one layer each; try parallel.pp=1",
    ),
    (
        OneFOneB(layers=(3, 3, 2)),
        {},
        "parallel.pipeline.layers=[3, 3, 2] must name one number for each stage, and parallel.pp=2 with "
        "parallel.pipeline.name=1f1b makes 2 stages; try parallel.pipeline.layers=null",
    ),
    (
        OneFOneB(layers=(8, 0)),
        {},
        "parallel.pipeline.layers=[8, 0] must give every stage at least one layer; try parallel.pipeline.layers=null",
    ),
    (
        OneFOneB(layers=(3, 4)),
        {},
        "parallel.pipeline.layers=[3, 4] must add up to model.n_layers=8, not 7; try parallel.pipeline.layers=null",
    ),
    (
        ZBV(),
        {"zero": 3},
        "parallel.zero=3 must be at most 2 with parallel.pipeline.name=zbv, whose backward pass needs the weights "
        "twice; try parallel.zero=2, or parallel.pipeline.name=interleaved",
    ),
    (
        OneFOneB(),
        {"global_batch_size": 4},
        "train.global_batch_size=4 over dp=2 and train.micro_batch_size=2 gives 1 micro-batches; "
        "parallel.pipeline.name=1f1b must have at least parallel.pp=2 of them; try train.global_batch_size=8",
    ),
    (
        DualPipeV(),
        {"global_batch_size": 12},
        "train.global_batch_size=12 over dp=2 and train.micro_batch_size=2 gives 3 micro-batches; "
        "parallel.pipeline.name=dualpipev must have at least 2 x parallel.pp=2 of them; try train.global_batch_size=16",
    ),
    (
        Interleaved(),
        {"global_batch_size": 20},
        "train.global_batch_size=20 over dp=2 and train.micro_batch_size=2 gives 5 micro-batches; "
        "parallel.pipeline.name=interleaved must divide them into 5 // parallel.pp=2 = 2 rounds of one size; "
        "try train.global_batch_size=16 or 24",
    ),
]


@pytest.mark.parametrize(("pipeline", "changes", "line"), CASES)
def test_each_rule_has_its_line(pipeline, changes, line):
    assert pipeline_problems(pipeline, **{**GOOD, **changes}) == ([] if line is None else [line])


@pytest.mark.parametrize(
    "pipeline", [OneFOneB(layers=(1, 2)), Interleaved(n_chunks=4), Interleaved(layers=(1, 1)), ZBV(), DualPipeV()]
)
@pytest.mark.parametrize("n_layers", [1, 3])
def test_without_a_pipeline_all_layers_are_one_part(pipeline, n_layers):
    """Its rules let every schedule pass with pp=1, where it is not used."""
    assert pipeline_problems(pipeline, **{**GOOD, "pp": 1, "n_layers": n_layers}) == []
    (part,) = rank_parts(ModelConfig(n_layers=n_layers), pipeline, 1, 0)
    assert part.layers == range(n_layers) and part.has_embedding and part.has_head


@given(
    schedule=st.sampled_from(SCHEDULES),
    pp=st.integers(2, 5),
    count=st.integers(1, 24),
    dp=st.integers(1, 3),
    micro_batch_size=st.integers(1, 3),
)
def test_the_batch_size_that_a_line_suggests_is_legal(schedule, pp, count, dp, micro_batch_size):
    values = {"pp": pp, "n_layers": 60, "zero": 1, "micro_batch_size": micro_batch_size, "dp": dp}
    lines = pipeline_problems(schedule, **values, global_batch_size=count * dp * micro_batch_size)
    for line in lines:
        for size in line.split("train.global_batch_size=")[-1].split(" or "):
            assert pipeline_problems(schedule, **values, global_batch_size=int(size)) == []


@pytest.mark.parametrize(("installed", "refused"), [("2.11.0+cu130", True), ("2.12.1", True), ("2.13.0+cpu", False)])
def test_split_backward_passes_want_a_torch_that_splits_rightly(monkeypatch, installed, refused):
    monkeypatch.setattr(rules, "version", lambda _: installed)
    lines = pipeline_problems(ZBV(), **GOOD)
    assert [line.partition(", which")[0] for line in lines] == (
        [f"parallel.pipeline.name=zbv must be 1f1b or interleaved with torch {installed}"] if refused else []
    )
    assert pipeline_problems(OneFOneB(), **GOOD) == []


def test_sixteen_bit_gradients_are_summed_in_fp32():
    """256 gradients of 2^-8 after one of 1: a bf16 sum stays at 1, the true sum is 2."""
    linear = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    sums = GradientSums(torch.bfloat16, PLAIN)
    for _ in range(2):  # nothing is left over from the step before
        linear.weight.grad = None
        for value in [1.0] + [2.0**-8] * 256:
            gradient = torch.full_like(linear.weight, value)
            linear.weight.grad = gradient if linear.weight.grad is None else linear.weight.grad + gradient
            sums.add(linear)
        sums.total(linear.weight).mul_(3)
        sums.hand_over()
        assert linear.weight.grad.item() == 6.0


def test_planted_sum_in_sixteen_bits_is_seen():
    linear = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    linear.weight.grad = torch.ones_like(linear.weight)
    for _ in range(256):
        linear.weight.grad += 2.0**-8
    assert linear.weight.grad.item() != 2.0
