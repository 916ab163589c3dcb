"""A batch that grows: layouts against one plain process, resumed against uninterrupted, and a proof across the growth.

The bounds are those of other layouts with SGD (tests/multiprocess/test_layouts.py): sums of gradients differ in order
alone. The bits of a resumed run are the uninterrupted one's.
"""

import dataclasses
import itertools

import pytest

from command_runs import ledger, numbers, train, write_config
from launcher.training.batch_ramp import BatchRamp
from layout_runs import MOE_MODEL, largest_error, run_config, run_layout, run_reference, write_tokens
from parallel.config import ParallelConfig
from parallel.pipeline.config import Interleaved
from prove_runs import failures, prove

BOUND = {"loss": 1e-6, "grad_norm": 1e-6, "weight": 1e-6, "buffer": 0.0}
RAMP = {"global_batch_size": 12, "batch_ramp": BatchRamp(start=4, increment=4, samples=16)}
SIZES = [4, 4, 8, 12, 12, 12]
FOUR_LAYERS = dataclasses.replace(MOE_MODEL, n_layers=4)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def ramped(tokens, parallel, micro_batch_size=1, **changes):
    return run_config(
        tokens, model=FOUR_LAYERS, parallel=parallel, steps=6, micro_batch_size=micro_batch_size, **{**RAMP, **changes}
    )


@pytest.mark.parametrize(
    ("ranks", "parallel", "micro_batch_size"),
    [
        (2, ParallelConfig(zero=1), 2),
        pytest.param(4, ParallelConfig(zero=1, tp=2, pp=2, ep=2), 1, marks=pytest.mark.slow),
        pytest.param(2, ParallelConfig(zero=2, cp=2), 2, marks=pytest.mark.slow),
        pytest.param(4, ParallelConfig(zero=3, tp=2), 1, marks=pytest.mark.slow),
        pytest.param(4, ParallelConfig(zero=1, pp=2, pipeline=Interleaved()), 1, marks=pytest.mark.slow),
    ],
    ids=["dp2", "tp2 pp2 ep2", "cp2", "tp2 dp2", "pp2 dp2 interleaved"],
)
def test_a_layout_grows_as_one_process_does(tokens, ranks, parallel, micro_batch_size):
    config = ramped(tokens, parallel, micro_batch_size)
    ours, reference = run_layout(config, ranks), run_reference(config, 1)
    errors = largest_error(ours, reference)
    assert all(errors[name] <= bound for name, bound in BOUND.items()), errors
    assert [row["batch_size"] for row in ours.rows] == SIZES


@pytest.mark.slow
def test_planted_a_batch_that_does_not_grow_is_seen(tokens):
    config = ramped(tokens, ParallelConfig(zero=1), 2)
    errors = largest_error(run_layout(config, 2), run_reference(ramped(tokens, ParallelConfig(), 2, batch_ramp=None)))
    assert errors["loss"] > 100 * BOUND["loss"] and errors["weight"] > 100 * BOUND["weight"]


@pytest.mark.slow
def test_resumed_within_the_ramp_is_bit_identical(tmp_path, tokens):
    """Stopped before an update of a new size; the samples are consecutive, and those of the ledger."""
    changes = {"zero": 1, **RAMP}
    whole = write_config(tmp_path, tokens, "whole", **changes)
    parts = write_config(tmp_path, tokens, "parts", **changes)
    uninterrupted = train(whole, 2)
    train(parts, 2, "train.steps=2")
    train(parts, 2, "train.steps=3")
    assert numbers(train(parts, 2)) == numbers(uninterrupted)
    assert [row["batch_size"] for row in uninterrupted] == SIZES
    assert ledger(parts) == ledger(whole)
    ends = list(itertools.accumulate(SIZES))
    assert [row["last_sample"] for row in ledger(whole)] == [end - 1 for end in ends]


GROWING = ("train.global_batch_size=32", "train.batch_ramp.start=8", "train.batch_ramp.increment=8")


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        pytest.param(2, ("train.precision=bf16",), marks=pytest.mark.slow),
        pytest.param(4, ("parallel.tp=2", "parallel.pp=2"), marks=pytest.mark.slow),
        pytest.param(4, ("parallel.ep=2", "parallel.zero=3"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_growth_is_proven(tmp_path, ranks, overrides):
    outcome = prove(tmp_path, (*GROWING, *overrides), ranks)
    assert outcome.proven, failures(outcome)
    assert outcome.config.train.batches.size_at(1) < outcome.config.train.batches.size_at(2)
