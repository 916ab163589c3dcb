"""What plans count of an update that needs whole matrices: which of them the busiest rank computes."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from launcher.closed_form.memory import memory_of
from launcher.closed_form.own_memory import update_bytes
from launcher.errors import UserError
from launcher.estimate.step import check_known, matrix_ops
from launcher.plan.closed_forms import step_of_rank
from launcher.plan.quick import MATRICES, fullest, job_on
from launcher.trace.parts import Axes
from launcher.trace.recorder import Recorder
from launcher.trace.regions import Regions
from launcher.traffic.matrices import busiest_owner, shares_in_group
from launcher.traffic.step import Step
from launcher.traffic.zero import optimizer_groups, replicated
from layout_runs import MOE_MODEL, run_config
from modeling.logical import logical_tensors
from modeling.optimizers.config import AdamWConfig, MuonConfig
from modeling.optimizers.orthogonal import scaled_orthogonal
from modeling.optimizers.rule import UpdateRule
from parallel.config import ParallelConfig

RULE = MuonConfig()


def step_on(n_ranks: int, rule: MuonConfig | AdamWConfig = RULE, **parallel: Any) -> Step:
    sizes: dict[str, Any] = {"model": MOE_MODEL, "global_batch_size": 48, "micro_batch_size": 1}
    config = run_config("none", parallel=ParallelConfig(**parallel), optimizer=rule, **sizes)
    return step_of_rank(config, n_ranks, 0)


def flops(matrices: Counter[tuple[int, int]]) -> int:
    return sum(n * RULE.matrix_work(*shape).flops for shape, n in matrices.items())


def all_matrices(*dims: str) -> Counter[tuple[int, int]]:
    """Of the whole model, by rows and columns; those with ``dims``."""
    found: Counter[tuple[int, int]] = Counter()
    for tensor in logical_tensors(MOE_MODEL).values():
        if tensor.weight.is_hidden_matrix and {*dims} <= {*tensor.weight.dims}:
            rows, columns = tensor.shape[-2:]
            found[rows, columns] += tensor.numel // (rows * columns)
    return found


@pytest.mark.parametrize(
    ("n_ranks", "parallel"), [(1, {"zero": 0}), (1, {"zero": 3}), (4, {"zero": 0}), (2, {"zero": 0, "tp": 2})]
)
def test_a_rank_without_owners_beside_it_computes_all(n_ranks, parallel):
    """Of what tp cuts, every rank the whole."""
    assert busiest_owner(step_on(n_ranks, **parallel)) == all_matrices()


def test_ep_deals_out_experts():
    others = all_matrices() - busiest_owner(step_on(2, zero=0, ep=2))
    assert others + others == all_matrices("experts") != Counter()


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_the_busiest_owner_has_at_least_its_share(zero, n_ranks):
    busiest, whole = flops(busiest_owner(step_on(n_ranks, zero=zero))), flops(all_matrices())
    assert whole / n_ranks <= busiest < whole


@pytest.mark.parametrize("zero", [1, 3])
def test_shares_are_every_element_once(zero):
    step = step_on(3, zero=zero)
    for _, n, names in replicated(step):
        for group in optimizer_groups(step, names):
            for name, shares in shares_in_group(step, n, group).items():
                ends = [start + length for start, length in shares if length]
                starts = [start for start, length in shares if length]
                assert starts == [0, *ends[:-1]] and ends[-1] == step.weights[name], name


@pytest.mark.parametrize(("zero", "precision", "tensors"), [(0, "fp32", 3), (1, "bf16", 5)])
def test_a_starts_plan_has_the_update_s_whole_matrices(zero, precision, tensors):
    """By hand, of stacks that are larger than what is whole at once: an update holds two of a round, three at work."""
    moe = dataclasses.replace(MOE_MODEL.moe, n_experts=64, d_ff=1024)
    model = dataclasses.replace(MOE_MODEL, d_model=1024, moe=moe)
    config = run_config("none", model=model, optimizer=RULE, parallel=ParallelConfig(zero=zero), precision=precision)
    job, _ = job_on(config, 1, None)
    held = fullest(config, 1, job)
    assert held.parts()[MATRICES] == held.matrices == 4 * tensors * (1 << 25)
    searched = memory_of(job)
    assert searched.tensors == pytest.approx(held.total, rel=1e-3)
    adamw = dataclasses.replace(config, optimizer=AdamWConfig())
    assert fullest(adamw, 1, job_on(adamw, 1, None)[0]).matrices == 0


def test_owners_share_what_is_whole():
    """A rank's own matrices, and the largest alone."""
    experts, largest = all_matrices("experts"), 32 * 48
    own = sum(rows * columns * n for (rows, columns), n in all_matrices().items()) / 8
    assert update_bytes(MOE_MODEL, RULE, ParallelConfig(zero=3, ep=2), 8) == 4 * (2 * own + 3 * largest)
    stack = 2 * 32 * 24
    assert experts and update_bytes(MOE_MODEL, RULE, ParallelConfig(zero=0, ep=2), 2) == 4 * 3 * max(stack, largest)


def test_an_iteration_holds_three_tensors():
    """And a little: the products of a matrix with itself."""
    matrix = torch.randn(8, 4096)
    with Recorder(Regions(), Axes(), held={"weights": [matrix]}) as recorder:
        scaled_orthogonal(matrix, torch.float32)
    assert 3.0 <= recorder.finish().peak_bytes / matrix.nbytes < 3.05


def test_a_rule_whose_products_nobody_counts_is_refused(monkeypatch):
    monkeypatch.setattr(MuonConfig, "matrix_work", UpdateRule.matrix_work)
    with pytest.raises(UserError, match="its matrix_work counts no products"):
        check_known(run_config("none", optimizer=RULE))


def test_only_a_rule_that_needs_them_has_products():
    assert list(matrix_ops(step_on(2, AdamWConfig(), zero=1))) == []
    exact = list(matrix_ops(step_on(2, zero=1)))
    low = list(matrix_ops(step_on(2, dataclasses.replace(RULE, iteration_dtype="bf16"), zero=1)))
    assert sum(op.work.flops for op in exact) == flops(busiest_owner(step_on(2, zero=1)))
    assert [op.work.flops for op in low] == [op.work.flops for op in exact]
    assert sum(op.work.bytes for op in low) < sum(op.work.bytes for op in exact)
