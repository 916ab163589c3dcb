"""Tensor and expert parallelism, with and without ZeRO, against one plain process. Tolerances as in test_zero.py."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_runs import DENSE_MODEL, MOE_MODEL, largest_error, run_config, run_layout, run_reference, write_tokens
from modeling.config import ModelConfig
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved, OneFOneB
from rotating import fast_where, some_fast

BOUND = 1e-6


def with_zero(layouts: list[tuple[int, dict]], fast: list[tuple[int, dict]]) -> list:
    """Each layout with every ZeRO stage; `make test` runs stage 1 of the ``fast`` ones, `make prove` the rest."""
    assert all(layout in layouts for layout in fast)
    return fast_where(
        [(*layout, zero) for layout in layouts for zero in (0, 1, 2, 3)],
        lambda ranks, layout, zero: zero == 1 and (ranks, layout) in fast,
    )


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
        ],
        fast=[
            (2, {"ep": 2}),
            (4, {"tp": 2, "ep": 2}),
            (4, {"cp": 2, "tp": 2, "cp_attention": "ring"}),
        ],
    ),
    ids=str,
)
def test_moe_layout_equals_one_process(tokens, ranks, layout, zero):
    config = run_config(tokens, parallel=ParallelConfig(zero=zero, **layout))
    errors = largest_error(run_layout(config, ranks), run_reference(config))
    assert max(errors.values()) <= BOUND, errors


def with_experts(n_experts: int, top_k: int, n_groups: int = 1, top_k_groups: int = 1) -> ModelConfig:
    """The model with so many experts, of eight channels, a shared one, and both auxiliary losses."""
    assert MOE_MODEL.moe is not None
    numbers = {"n_experts": n_experts, "top_k": top_k, "n_groups": n_groups, "top_k_groups": top_k_groups}
    return dataclasses.replace(MOE_MODEL, moe=dataclasses.replace(MOE_MODEL.moe, d_ff=8, **numbers))


COUNTS = [
    (4, {"ep": 4}, (256, 8, 8, 4)),
    (8, {"ep": 8}, (256, 8, 8, 4)),
    (8, {"tp": 2, "ep": 8}, (256, 8, 8, 4)),
    (4, {"ep": 4}, (60, 6)),
    (3, {"ep": 3}, (60, 6)),
    (6, {"tp": 2, "ep": 6}, (60, 7, 5, 3)),
    (2, {"tp": 2}, (7, 3)),
    (3, {"ep": 3}, (63, 8)),
    (7, {"ep": 7}, (7, 7)),
    (4, {"cp": 2, "ep": 2}, (30, 11, 3, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout", "numbers"), COUNTS, ids=str)
def test_any_number_of_experts_equals_one_process(tokens, ranks, layout, numbers):
    check_experts(tokens, ranks, layout, with_experts(*numbers))


def check_experts(tokens: str, ranks: int, layout: dict, model: ModelConfig) -> None:
    """Two updates in batches that so many processes share equally."""
    parallel = ParallelConfig(zero=1, **layout)
    config = run_config(tokens, model=model, parallel=parallel, global_batch_size=2 * ranks, steps=2)
    errors = largest_error(run_layout(config, ranks), run_reference(config))
    assert max(errors.values()) <= BOUND, errors


@pytest.mark.slow
def test_experts_that_no_power_of_two_divides_equal_one_process(tokens):
    """Any degree of ep up to seven, any multiple of it as experts, any number of them for a token."""

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(ep=st.integers(1, 7), share=st.integers(1, 23), choice=st.integers(0, 10_000))
    def check(ep: int, share: int, choice: int) -> None:
        n_experts = ep * share
        check_experts(tokens, ep, {"ep": ep}, with_experts(n_experts, 1 + choice % n_experts))

    check()


@pytest.mark.parametrize("zero", some_fast([0, 1, 2, 3], 1, 3))
def test_dense_tp_equals_one_process(tokens, zero):
    config = run_config(tokens, model=DENSE_MODEL, parallel=ParallelConfig(zero=zero, tp=2))
    errors = largest_error(run_layout(config, 4), run_reference(config))
    assert max(errors.values()) <= BOUND, errors


@pytest.mark.parametrize(  # on two ranks no weight has another replica; bf16 without tp in `make test`: test_zero.py
    ("zero", "precision", "ranks", "layout"),
    [
        *fast_where(
            product([1, 2, 3], ["bf16", "fp16"], [4, 2], [{"tp": 2, "ep": 2}]),
            lambda zero, precision, ranks, _: (zero, precision, ranks) == (1, "fp16", 2),
        ),
        (2, "bf16", 2, {"pp": 2}),  # gradients are summed by us until the step's end
        (3, "bf16", 2, {"pp": 2}),
        (1, "bf16", 2, {"ep": 2}),  # dense weights have another replica, experts none
    ],
    ids=str,
)
def test_low_precision_is_near_one_process_in_that_precision(tokens, zero, precision, ranks, layout):
    """Not bit for bit: tp sums halves of a product in another order, which 8 (bf16) or 11 bits round differently.

    The bounds are four times what two micro-batch sizes of the plain process differ by in that precision.
    """
    sizes = {"micro_batch_size": 1} if "pp" in layout else {}
    config = run_config(tokens, parallel=ParallelConfig(zero=zero, **layout), precision=precision, steps=3, **sizes)
    reference = run_reference(config)
    spread = largest_error(run_reference(config, micro_batch_size=1), reference)
    errors = largest_error(run_layout(config, ranks), reference)
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
        ],
        # tp, cp and ep in a pipeline: on sixteen processes below
        fast=[(2, {"pp": 2})],
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
