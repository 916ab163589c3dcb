"""A batch in which no target counts: a step of loss 0 that changes nothing, the same under every layout.

A corpus has a stretch of one-token documents (empty lines of a log, say); no token of it predicts another.
"""

import dataclasses
import re

import pytest

from layout_runs import MOE_MODEL, LayoutResult, merge, run_config, run_reference
from modeling.moe_config import BiasBalance
from no_target_runs import (
    EMPTY_STEP,
    NoTargetResult,
    as_first_of,
    no_target_rank,
    one_token_documents,
    write_tokens_without_targets,
)
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV
from parallel.processes.start import run_ranks
from prove_runs import failures, prove

MODEL = dataclasses.replace(
    MOE_MODEL, n_layers=4, moe=dataclasses.replace(MOE_MODEL.moe, balance=BiasBalance(rate=0.01))
)
STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "fp16"), (2, "bf16")]
LAYOUTS = {
    "dp": (2, {}, [(0, "fp32"), (3, "fp32"), (1, "fp16")]),
    "dp, all stages": (2, {}, STAGES),
    "pp": (2, {"pp": 2}, [(1, "fp32")]),
    "tp": (2, {"tp": 2}, STAGES),
    "cp": (2, {"cp": 2}, STAGES[1:4]),
    "ep": (2, {"ep": 2}, STAGES[1:]),
    "tp x ep": (4, {"tp": 2, "ep": 2}, STAGES[1:]),
    "pp x cp, zero-bubble": (4, {"pp": 2, "cp": 2, "pipeline": ZBV()}, STAGES[:2]),
}
# Weights after four steps, against one process; in 16 bits a few times half a unit in the last place of numbers near 1.
BOUNDS = {"fp32": 2e-6, "fp16": 2.0**-9, "bf16": 2.0**-6}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens_without_targets(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def reference(tokens) -> LayoutResult:
    return run_reference(run_config(tokens, model=MODEL, steps=4))


def test_the_reference_skips_it_too(reference: LayoutResult) -> None:
    assert reference.losses[EMPTY_STEP - 1] == 0.0
    assert all(loss > 0 for number, loss in enumerate(reference.losses, 1) if number != EMPTY_STEP)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_without_targets_changes_nothing_but_its_number(tokens, reference: LayoutResult, name: str) -> None:
    n_ranks, axes, stages = LAYOUTS[name]
    first = run_config(tokens, model=MODEL, parallel=ParallelConfig(**axes), steps=4, micro_batch_size=1)
    configs = [as_first_of(first, zero, precision) for zero, precision in stages]
    ranks: list[list[NoTargetResult]] = run_ranks(
        no_target_rank, n_ranks, configs, timeout_seconds=280, threads=1, preload=["launcher.training.loop"]
    )
    for (zero, precision), seen in zip(stages, zip(*ranks, strict=True), strict=True):
        where = f"{name}, ZeRO {zero}, {precision}"
        assert all(all(rank.unchanged) and rank.unchanged for rank in seen), where
        ours = merge([rank.result for rank in seen])
        row = ours.rows[EMPTY_STEP - 1]
        assert (row["loss"], row["skipped"], row["step"]) == (0.0, True, EMPTY_STEP), where
        assert ours.rows[-1]["tokens"] == 4 * 8 * 24, where
        masters = reference.state["weight"]
        error = max(float((ours.state["weight"][key] - masters[key]).abs().max()) for key in masters)
        assert error <= BOUNDS[precision], (where, error)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_proof_on_documents_of_one_token_finds_both_sides_alike(tmp_path, precision: str) -> None:
    """No step of it has a target; only the gradients of the auxiliary losses are there to be compared, and dropped.

    A token alone in its document attends to itself whatever its query and key are: their gradients are rounding.
    """
    outcome = prove(tmp_path, ("parallel.zero=2", f"train.precision={precision}"), on_both_sides=(one_token_documents,))
    assert outcome.died is None
    failed = [check for check in outcome.checks if not check.passed]
    rounding = [check for check in failed if re.search(r"attention\.[qk](_norm)?\.weight", check.worst)]
    assert failed == rounding, failures(outcome)
    assert all(check.name.endswith("gradients") for check in rounding), failures(outcome)
