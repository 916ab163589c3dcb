"""From events to seconds by part: every moment of a step belongs somewhere, and to one part only."""

import json

import pytest

import launcher.profile.report as report
from launcher.profile.report import rows_of
from launcher.profile.spans import NODE, STEP, Span, seconds_by_part
from launcher.trace.parts import HOST, Axes
from launcher.trace.regions import MARK, Stretches
from launcher.trace.roofline import Sum
from modeling.kernels.fused_delta import FUNCTION

MS = 1_000_000
STRETCHES = Stretches([0, 10, 20], ["embedding", "attention", "norms"])


def span(name: str, begin: float, end: float, **more) -> Span:
    return Span(name, round(begin * MS), round(end * MS), **more)


def step(*inner: Span, end: float = 100) -> list[Span]:
    return [span(STEP, 0, end), *inner]


def seconds(spans: list[Span]) -> dict[tuple[str, str], float]:
    """Milliseconds by part and phase."""
    found: dict[tuple[str, str], float] = {}
    for (part, phase, _), taken in seconds_by_part(spans, STRETCHES, Axes()).items():
        found[part, phase] = round(found.get((part, phase), 0) + taken * 1e3, 6)
    assert sum(found.values()) == pytest.approx((spans[0].end - spans[0].begin) / MS)
    return found


def test_what_runs_in_a_region_is_the_region_s_by_kind():
    attention = span(f"{MARK}attention forward", 10, 50)
    spans = step(attention, span("aten::linear", 12, 22), span("aten::mm", 14, 20), span("aten::mul", 30, 40))
    spans += [span("aten::copy_", 15, 16)]  # within the product
    assert seconds(spans) == {
        ("attention: products", "forward"): 6,
        ("attention: RoPE, norms", "forward"): 34,
        ("batches, metrics", "forward"): 60,
    }


def test_the_backward_pass_goes_by_the_nodes_numbers():
    nodes = [span(f"{NODE}MmBackward0", 10, 30, node=12), span(f"{NODE}AccumulateGrad", 30, 40, node=-1)]
    again = span(f"{MARK}norms recompute", 41, 45)
    late = span(f"{NODE}MulBackward0", 40, 50, node=15)
    spans = step(*nodes, span("aten::mm", 12, 25), late, again)
    assert seconds(spans) == {
        ("attention: products", "backward"): 13,
        ("attention: RoPE, norms", "backward"): 13,
        ("norms, residual sums", "recompute"): 4,
        ("gradients: sums", "backward"): 10,
        ("batches, metrics", "forward"): 60,
    }


def test_nodes_made_within_another_are_that_ones():
    """A function that computes again in its backward pass: what it made last lies behind every stretch."""
    again = [span("aten::mul", 12, 14, node=25), span(f"{NODE}MulBackward0", 15, 20, node=25)]
    inner = span("aten::mul", 16, 19)
    spans = step(span(f"{NODE}_RerunBackward", 10, 30, node=12), *again, inner)
    assert seconds(spans) == {("attention: RoPE, norms", "backward"): 20, ("batches, metrics", "forward"): 80}
    elsewhere = step(span(f"{NODE}MulBackward0", 10, 30, node=25))
    assert ("norms, residual sums", "backward") in seconds(elsewhere)


def test_the_rule_of_linear_attention_is_its_packages_function():
    """Whose kernels, and what it does besides, no operation of torch's names: forward and in its node."""
    forward = span(f"{MARK}linear_attention forward", 10, 50)
    rule = [span(FUNCTION, 20, 40), span("aten::empty", 21, 22)]
    node = span(f"{NODE}{FUNCTION}Backward", 60, 80, node=12)
    found = seconds(step(forward, *rule, node, span(f"{FUNCTION}Backward", 61, 79)))
    assert found["linear attention: rule", "forward"] == 20 and found["linear attention: rest", "forward"] == 20
    assert found["attention: scores", "backward"] == 20  # the region of node 12 here


def test_a_wait_for_a_message_is_communication_and_what_is_computed_meanwhile_is_not():
    experts = span(f"{MARK}experts forward", 10, 60)
    begun = span("c10d::alltoall_base_", 12, 13)
    under_way = span("gloo:all_to_all", 12.5, 50, thread=7, is_async=True)
    spans = step(experts, begun, under_way, span("aten::mul", 20, 30))
    found = seconds(spans)
    assert found["communication: ep", "forward"] == 28  # 12 to 20, and 30 to 50
    assert found["experts: dispatch, activation", "forward"] == 22


def test_on_a_gpu_moments_are_those_of_kernels():
    attention = [span(f"{MARK}attention forward", 0, 10), span("aten::mm", 1, 2, number=5)]
    sums = [span(f"{MARK}optimizer update", 20, 30), span("c10d::allreduce_", 21, 22, number=6)]
    kernels = [
        span("gemm", 30, 60, on_gpu=True, launched_by=5, thread=99),
        span("ncclDevKernel_AllReduce_Sum_f32", 50, 80, on_gpu=True, launched_by=6, thread=98),
    ]
    assert seconds(step(*attention, *sums, *kernels)) == {
        (HOST, "forward"): 50,
        ("attention: products", "forward"): 30,
        ("communication: ZeRO", "update"): 20,
    }


def test_shares_sum_to_one_and_the_json_has_every_row():
    sums = {("router", "forward"): Sum(seconds=1.0, by_bound={"memory": 1.0}, flops=4.0, launches=2)}
    rows = rows_of({("router", "forward"): 2.0, ("router", "backward"): 1.0, ("other", "forward"): 1.0}, sums)
    assert [row["part"] for row in rows] == ["router", "other"]
    assert sum(row["share"] for row in rows) == 1
    assert (rows[0]["roofline"], rows[0]["bound"]) == (1 / 3, "memory")
    json.dumps(rows)


def test_planted_part_that_is_dropped_is_seen(monkeypatch):
    """A part that the table does not know would be missing from its sum."""
    monkeypatch.setattr(report, "PARTS", tuple(part for part in report.PARTS if part != "router"))
    with pytest.raises(AssertionError, match="router"):
        rows_of({("router", "forward"): 2.0}, {})


def test_planted_stretch_that_nobody_counts_breaks_the_sum(monkeypatch):
    """``seconds`` above compares the sum with the step."""
    import launcher.profile.spans as module

    whole = module.nested
    monkeypatch.setattr(module, "nested", lambda *each: [row for row in whole(*each) if row[2].kind != "product"])
    with pytest.raises(AssertionError):
        test_what_runs_in_a_region_is_the_region_s_by_kind()
