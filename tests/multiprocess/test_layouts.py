"""Tensor and expert parallelism, with and without ZeRO, against one plain process. Tolerances as in test_zero.py."""

import dataclasses

import pytest

from layout_runs import DENSE_MODEL, MOE_MODEL, largest_error, run_config, run_layout, run_reference, write_tokens
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB

BOUND = 1e-6


def with_zero(layouts: list[tuple[int, dict]]) -> list:
    """Each layout with every ZeRO stage; `make test` runs stage 1, `make prove` the rest."""
    return [
        pytest.param(ranks, layout, zero, marks=[] if zero == 1 else [pytest.mark.slow])
        for ranks, layout in layouts
        for zero in (0, 1, 2, 3)
    ]


FOUR_LAYERS = dataclasses.replace(MOE_MODEL, n_layers=4)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize(
    ("ranks", "layout", "zero"),
    with_zero(
        [
            (2, {"tp": 2}),
            (2, {"ep": 2}),
            (2, {"tp": 2, "ep": 2}),
            (4, {"tp": 2}),
            (4, {"ep": 2}),
            (4, {"tp": 2, "ep": 2}),
            (4, {"tp": 2, "ep": 4}),
            (2, {"cp": 2}),
            (2, {"cp": 2, "cp_attention": "ring"}),
            (4, {"cp": 2, "ep": 2}),
            (4, {"cp": 2, "tp": 2, "ep": 4}),
            (4, {"cp": 2, "tp": 2, "cp_attention": "ring"}),
        ]
    ),
    ids=str,
)
def test_moe_layout_equals_one_process(tokens, ranks, layout, zero):
    config = run_config(tokens, parallel=ParallelConfig(zero=zero, **layout))
    errors = largest_error(run_layout(config, ranks), run_reference(config))
    assert max(errors.values()) <= BOUND, errors


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_dense_tp_equals_one_process(tokens, zero):
    config = run_config(tokens, model=DENSE_MODEL, parallel=ParallelConfig(zero=zero, tp=2))
    errors = largest_error(run_layout(config, 4), run_reference(config))
    assert max(errors.values()) <= BOUND, errors


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("zero", [1, *(pytest.param(zero, marks=pytest.mark.slow) for zero in (2, 3))])
def test_low_precision_is_near_one_process_in_that_precision(tokens, zero, precision):
    """Not bit for bit: tp sums halves of a product in another order, which 8 (bf16) or 11 bits round differently.

    The bounds are four times what two micro-batch sizes of the plain process differ by in that precision.
    """
    config = run_config(tokens, parallel=ParallelConfig(zero=zero, tp=2, ep=2), precision=precision, steps=3)
    reference = run_reference(config)
    spread = largest_error(run_reference(config, micro_batch_size=1), reference)
    errors = largest_error(run_layout(config, 4), reference)
    for check in ("loss", "grad_norm", "weight"):
        assert errors[check] <= 4 * max(spread[check], FLOOR[precision]), (check, errors, spread)


FLOOR = {"bf16": 2.0**-9, "fp16": 2.0**-12}  # half a unit in the last place of numbers near one


@pytest.mark.parametrize(
    ("ranks", "layout", "zero"),
    with_zero(
        [
            (2, {"pp": 2}),
            (2, {"pp": 2, "pipeline": ZBV()}),
            (4, {"pp": 2, "ep": 2}),
            (4, {"pp": 2, "tp": 2, "ep": 2}),
            (4, {"pp": 2, "cp": 2, "pipeline": Interleaved(n_chunks=2)}),
            (4, {"pp": 2, "tp": 2, "pipeline": DualPipeV()}),
            (8, {"pp": 2, "tp": 2, "ep": 2}),
        ]
    ),
    ids=str,
)
def test_pipeline_layout_equals_one_process(tokens, ranks, layout, zero):
    if zero == 3 and layout.get("pipeline") in (ZBV(), DualPipeV()):
        layout = {**layout, "pipeline": OneFOneB()}  # torch's zero-bubble schedules cannot run on ZeRO 3: refused
    config = run_config(tokens, model=FOUR_LAYERS, parallel=ParallelConfig(zero=zero, **layout), micro_batch_size=1)
    errors = largest_error(run_layout(config, ranks), run_reference(config))
    assert max(errors.values()) <= BOUND, errors


@pytest.mark.parametrize("pipeline", [OneFOneB(), pytest.param(ZBV(), marks=pytest.mark.slow)], ids=str)
def test_all_five_axes_on_sixteen_processes(tokens, pipeline):
    """tp2 x pp2 x cp2 x dp2 with ep 4, MoE, tied embeddings."""
    parallel = ParallelConfig(zero=1, tp=2, pp=2, cp=2, ep=4, pipeline=pipeline)
    config = run_config(tokens, model=FOUR_LAYERS, parallel=parallel, micro_batch_size=1, steps=3)
    errors = largest_error(run_layout(config, 16), run_reference(config))
    assert max(errors.values()) <= BOUND, errors
