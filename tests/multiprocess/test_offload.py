"""Activations on the host under every axis: the same numbers, bit for bit, as where they stay on the device."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from layout_runs import MOE_MODEL, LayoutResult, run_config, run_layout, write_tokens
from modeling.optimizers.config import AdamWConfig
from parallel.config import ParallelConfig
from parallel.pipeline.config import SCHEDULES
from pp_runs import MOE, Case, run_case
from rotating import fast_where

MODES = ("none", "selective", "feed_forward", "full")
EACH_ITS_OWN = ("full", "selective", "none", "feed_forward", "none")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    list(product(SCHEDULES, [*MODES, EACH_ITS_OWN])),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_pipeline_finds_the_same_gradients(schedule, recompute):
    """Also where a backward pass comes in parts, and where several micro-batches are in flight. Memory is not new."""
    case = Case(MOE, schedule, recompute=recompute, n_micro=4, steps=2)
    plain, ours = run_case(case), run_case(replace(case, offload=True))
    assert ours.losses == plain.losses
    for mine, theirs in zip(ours.gradients, plain.gradients, strict=True):
        assert all(torch.equal(mine[name], each) for name, each in theirs.items())
    assert min(ours.pages) > 0 == max(plain.pages)


LAYOUTS = {
    "zero3 ep2": (ParallelConfig(zero=3, ep=2), 2),
    "zero2 cp2 ring": (ParallelConfig(zero=2, cp=2, cp_attention="ring"), 2),
    "zero2 cp2": (ParallelConfig(zero=2, cp=2), 2),
    "zero1 tp2 ep2": (ParallelConfig(zero=1, tp=2, ep=2), 2),
    "zero0": (ParallelConfig(zero=0), 2),
    "tp2 pp2 dp2": (ParallelConfig(tp=2, pp=2), 8),
}


@pytest.mark.parametrize(
    ("layout", "recompute"),
    fast_where(product(LAYOUTS, MODES), lambda *case: case == ("zero1 tp2 ep2", "full")),
    ids=str,
)
def test_a_layout_trains_the_same(tokens, layout, recompute):
    parallel, n_ranks = LAYOUTS[layout]
    config = run_config(
        tokens, model=MOE_MODEL, parallel=parallel, recompute=recompute, optimizer=AdamWConfig(lr=1e-3), steps=2
    )
    on_host = replace(config, train=replace(config.train, offload_activations=True))
    plain, ours = run_small(config, n_ranks), run_small(on_host, n_ranks)
    assert ours.losses == plain.losses and ours.grad_norms == plain.grad_norms
    for kind, tensors in plain.state.items():
        assert all(torch.equal(ours.state[kind][name], each) for name, each in tensors.items()), kind


def run_small(config, n_ranks) -> LayoutResult:
    return run_layout(config, n_ranks, small_sizes=True)
