"""The parts of a plan: the schedule's order in time, values that nobody has, the ledger, and wrong input."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from launcher.cli import main
from launcher.estimate.ledger import BUFFERS, Ledger
from launcher.estimate.order import Passes, simulate
from launcher.estimate.pass_over import evenly
from launcher.estimate.ranks import as_rank
from launcher.estimate.values import KnownAnswers, KnownValues, unknown
from launcher.estimate.whole_step import row_sizes
from launcher.plan.report import verdict
from modeling.optimizers.config import AdamWConfig
from modeling.optimizers.sgd import SGDConfig
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB, chunks


@pytest.mark.parametrize(("pp", "n_micro_batches"), [(1, 4), (2, 4), (4, 8)])
def test_one_f_one_b_waits_as_its_paper_says(pp, n_micro_batches):
    """Narayanan et al. 2021, section 2.2: a step of m micro-batches takes m + pp - 1 of them."""
    order = simulate(OneFOneB(), [Passes(1.0, 2.0)] * pp, n_micro_batches)
    assert max(order.ends) == 3.0 * (n_micro_batches + pp - 1)
    assert order.bubble == pytest.approx((pp - 1) / (n_micro_batches + pp - 1))


def test_a_slow_position_and_a_slow_link_hold_up_the_others():
    even = simulate(OneFOneB(), [Passes(1.0, 2.0)] * 2, 8)
    slow = simulate(OneFOneB(), [Passes(1.0, 2.0), Passes(2.0, 4.0)], 8)
    far = simulate(OneFOneB(), [Passes(1.0, 2.0, hop=0.5)] * 2, 8)
    assert max(slow.ends) >= 8 * 6.0 > max(even.ends)
    assert max(far.ends) > max(even.ends)


def test_zero_bubble_waits_less():
    whole = simulate(OneFOneB(), [Passes(2.0, 4.0)] * 4, 8)
    parts = simulate(ZBV(), [Passes(1.0, 2.0)] * 4, 8)
    assert sum(parts.busy) == sum(whole.busy) and parts.bubble < whole.bubble


def test_the_first_stage_leaves_all_to_its_weights_part():
    """torch's stage 0 has no gradient to send, so its part of inputs is empty (PipelineStage.backward_one_chunk)."""
    spans = simulate(ZBV(), [Passes(1.0, 2.0)] * 2, 4).spans
    taken = {(span.action.kind, span.action.stage): span.end - span.begin for each in spans for span in each}
    assert (taken["I", 1], taken["W", 1]) == (1.0, 1.0)
    assert {taken.get(("I", 0), 0.0), taken.get(("W", 0), 2.0)} == {0.0, 2.0}


def test_a_pair_is_sent_after_its_second_pass():
    """Four positions, eight micro-batches: sent at once, they would take 25.5 s."""
    assert max(simulate(DualPipeV(), [Passes(0.5, 1.0)] * 4, 8).ends) == 27.0


def test_passes_do_not_overlap_and_none_is_missing():
    for pipeline in (OneFOneB(), Interleaved(), ZBV(), DualPipeV()):
        found = simulate(pipeline, [Passes(1.0, 2.0, hop=0.1)] * 4, 8)
        for spans, busy in zip(found.spans, found.busy, strict=True):
            assert all(one.end <= other.begin + 1e-9 for one, other in itertools.pairwise(spans))
            assert sum(span.action.kind == "F" for span in spans) == 8 * chunks(pipeline)
            assert busy == pytest.approx(8 * chunks(pipeline) * 3.0)


def test_whole_numbers_are_followed_and_others_answered():
    known = KnownValues()
    with FakeTensorMode(allow_non_fake_inputs=True), known, KnownAnswers(known):
        batch = torch.tensor([3, 1, 2]) + torch.arange(3)
        weights = torch.ones(3)
        assert not isinstance(weights, type(None)) and float(weights.sum()) == unknown(torch.float32) == 1.0
        assert torch.zeros(2, dtype=torch.uint8).max().item() == 0
        assert torch.arange(4).tolist() == [0, 1, 2, 3]
        assert (torch.arange(4) > 1).nonzero().flatten().tolist() == [2, 3]
        assert torch.nn.functional.grouped_mm(
            torch.empty(6, 8), torch.empty(2, 8, 16), offs=torch.tensor([2, 6], dtype=torch.int32)
        ).shape == (6, 16)
    assert batch.shape == (3,)


@pytest.mark.parametrize(
    "rule", [AdamWConfig(), SGDConfig(), SGDConfig(momentum=0.9)], ids=["adamw", "sgd", "momentum"]
)
def test_an_update_runs_over_tensors_of_a_gpu_that_is_not_there(rule):
    """By torch's fused kernels, as on a GPU: torch has no rule for fake tensors of every one."""
    known = KnownValues()
    with FakeTensorMode(allow_non_fake_inputs=True), known, KnownAnswers(known):
        weight = torch.nn.Parameter(torch.empty(8, 4, device="cuda"))
        optimizer = rule.build([{"params": [weight], "weight_decay": 0.1}], fused=True)
        for _ in range(2):
            weight.grad = torch.empty(8, 4, device="cuda")
            optimizer.step()
        assert len(optimizer.state[weight]) >= len(rule.states)


def test_the_ledger_counts_a_storage_once_until_it_is_gone():
    with Ledger() as ledger:
        first = torch.ones(10)
        second = first.view(2, 5)
        assert ledger.total == 40
        third = first + 1
        assert (ledger.total, ledger.peak) == (80, 80)
        ledger.sort({"weights": [first]})
        del third
        ledger.begin()
        _ = second.clone()
    assert ledger.peak == 80 and ledger.at_peak["weights"] == 40 and ledger.at_peak[BUFFERS] == 40


@pytest.mark.parametrize(("device", "copied"), [("cpu", 160), ("cuda", 0)])
def test_the_ledger_counts_what_gloo_copies(device: str, copied: int) -> None:
    """Not for a plan of a GPU, where NCCL reduces and scatters in place."""
    with as_rank(0, 2), FakeTensorMode(), Ledger(device) as ledger:
        out, given = torch.empty(20, device=device), torch.empty(40, device=device)
        ledger.begin()
        dist.reduce_scatter_tensor(out, given)
        torch.empty(1, device=device)
    assert ledger.peak == 80 + 160 + max(copied, 4) and ledger.total == 240


def test_rows_are_dealt_evenly_with_the_imbalance_on_top():
    assert evenly(7, 3) == [3, 2, 2]
    (sent,), (received,) = row_sizes(100, 1.5)(torch.empty(4), torch.empty(4, 2), [2])
    assert sum(sent) == 100 and sum(received) == 150


def test_the_verdict_names_what_holds_most():
    plan = {"memory_bytes": 80 * 10**9, "peak_bytes": 100 * 10**9, "holds_most": "weights", "gpu": "H100"}
    assert verdict(plan | {"fits": False}) == (
        "does not fit: 100.00 GB, 20.00 more than the 80.00 of a H100; the largest part is weights"
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--gpu", "H1"], "--gpu=H1 must be one of A100-40GB, A100-80GB, B200, B300, GB200, GB300, H100, H200"),
        (["--gpus", "3", "parallel.tp=2"], "parallel"),
        (["train.precision=fp32"], "train.precision=fp32 with model.moe cannot be traced"),
        (["--imbalance", "0.5"], "--imbalance=0.5 must be a number of at least 1"),
        (["--imbalance", "nan"], "--imbalance=nan must be a number of at least 1"),
    ],
)
def test_wrong_input_is_told_in_one_line(capsys, arguments, line):
    assert main(["plan", "configs/quickstart.yaml", *arguments]) == 2
    said = capsys.readouterr()
    assert line in said.err and said.err.count("\n") == 1 and not said.out
