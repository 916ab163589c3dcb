"""`parallel.grad_reduce`: gradients reduced in several buckets, during each backward pass or during the last.

Equal to one plain process as every layout is (test_zero.py has the tolerance), to a run that reduces once a step, and
across a change of the key between a checkpoint and its resume.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from command_runs import train, write_config
from grad_reduce_runs import FAULTS, OVERWRITTEN, ROUNDED, in_ranks, run_each
from launcher.config.tree import RunConfig
from layout_runs import DENSE_MODEL, MOE_MODEL, largest_error, run_config, run_reference, write_tokens
from modeling.mtp_config import MTPConfig
from modeling.optimizers.config import MuonConfig, SGDConfig
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved
from prove_runs import failures, prove
from rotating import fast_where
from traffic_runs import problems, run_counts

BOUND = 1e-6
LAST = "last_micro_batch"
EACH = ("parallel.zero=1", "parallel.grad_reduce=micro_batch")
FOUR_LAYERS = dataclasses.replace(MOE_MODEL, n_layers=4)
FURTHER = dataclasses.replace(FOUR_LAYERS, family="none", mtp=MTPConfig())
MODELS = {
    "dense": DENSE_MODEL,
    "moe": MOE_MODEL,
    "odd": dataclasses.replace(MOE_MODEL, vocab_size=97),
    "tied": FOUR_LAYERS,  # two ranks of a pipeline hold the embedding, or one of a V works with it twice
    "untied": dataclasses.replace(FOUR_LAYERS, tie_embeddings=False),
    "further tokens": FURTHER,
    "further tokens, untied": dataclasses.replace(FURTHER, tie_embeddings=False),
}
SMALL = {"micro_batch_size": 1}
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {}, {"model": "dense"}),
    (2, {"ep": 2}, {**SMALL, "recompute": "full"}),
    (3, {}, {"model": "odd", "global_batch_size": 6}),
    (2, {"tp": 2}, {}),
    (2, {"cp": 2}, {"recompute": "selective"}),
    (2, {"cp": 2, "cp_attention": "ring"}, SMALL),
    (4, {"ep": 2}, {}),
    (4, {"tp": 2, "ep": 4}, {"recompute": "full"}),
    (4, {"cp": 2, "tp": 2, "ep": 2}, {}),
    (4, {"pp": 2}, {**SMALL, "model": "tied"}),
    (4, {"pp": 2, "ep": 2}, {**SMALL, "model": "untied", "recompute": "full"}),
    (4, {"pp": 2, "pipeline": Interleaved()}, {**SMALL, "model": "tied"}),
    (4, {"pp": 2, "ep": 2, "pipeline": ZBV()}, {**SMALL, "model": "tied"}),
    (4, {"pp": 2, "tp": 2, "pipeline": ZBV()}, {**SMALL, "model": "tied"}),
    (4, {"pp": 2, "ep": 2, "pipeline": DualPipeV()}, {**SMALL, "model": "untied", "recompute": "full"}),
    (8, {"pp": 2, "tp": 2, "cp": 2, "ep": 4, "pipeline": ZBV()}, {**SMALL, "model": "tied"}),
    (4, {"pp": 2}, {**SMALL, "model": "further tokens"}),
    (4, {"pp": 2, "pipeline": ZBV()}, {**SMALL, "model": "further tokens, untied"}),
]
QUICK = CASES[1]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def reducing(config: RunConfig, when: str = "micro_batch", dtype: str = "fp32") -> RunConfig:
    """The run with gradients reduced at another time, or sent in another dtype."""
    parallel = dataclasses.replace(config.parallel, grad_reduce=when, grad_reduce_dtype=dtype)
    return dataclasses.replace(config, parallel=parallel)


def a_run(tokens: str, layout: dict[str, Any], model: str = "moe", **changes: Any) -> RunConfig:
    return run_config(tokens, model=MODELS[model], parallel=ParallelConfig(**layout), **changes)


@pytest.mark.parametrize(("ranks", "layout", "train"), fast_where(CASES, lambda *case: case == QUICK), ids=str)
def test_sgd_equals_one_process(tokens, ranks, layout, train):
    """In fp32 both wires are fp32: a reduce-scatter, and an all-to-all whose receivers sum."""
    config = a_run(tokens, layout, **train)
    reference = run_reference(config)
    for ours in run_each([reducing(config), reducing(config, dtype="bf16"), reducing(config, LAST)], ranks):
        errors = largest_error(ours, reference)
        assert max(errors.values()) <= BOUND, errors


LOW = [
    ("bf16", 2, {"ep": 2}, "moe"),
    ("bf16", 4, {"pp": 2, "pipeline": ZBV()}, "tied"),
    ("bf16", 4, {"tp": 2}, "moe"),
    ("fp16", 2, {}, "moe"),
    ("fp8", 2, {}, "dense"),
]


@pytest.mark.parametrize(
    ("precision", "ranks", "layout", "model"), fast_where(LOW, lambda *case: case == LOW[0]), ids=str
)
def test_low_precision_equals_the_run_that_reduces_once_a_step(tokens, precision, ranks, layout, model):
    """The passes are the same, and gradients are summed in fp32: after one update masters differ by its rounding alone.

    bf16 gradients that travel as they are give the same: nothing is rounded on the wire.
    """
    config = a_run(tokens, layout, model, precision=precision, micro_batch_size=1, steps=1)
    dtypes = ["fp32"] if precision == "fp16" else ["fp32", "bf16"]
    ways = [*(reducing(config, dtype=dtype) for dtype in dtypes), reducing(config, LAST)]
    step, *each = run_each([config, *ways], ranks)
    for ours in each:
        assert ours.losses == step.losses
        errors = largest_error(ours, step)
        assert errors["weight"] <= 1e-8 and errors["grad_norm"] <= 1e-7, errors


def test_planted_sums_of_what_is_received_in_bf16_are_seen(tokens):
    config = run_config(tokens, parallel=ParallelConfig(), precision="bf16", micro_batch_size=1, steps=1)
    step, ours = run_each([config, reducing(config, dtype="bf16")], 2, [None, ROUNDED])
    assert ours.losses == step.losses
    assert largest_error(ours, step)["weight"] > 1e-7


def test_planted_faults_are_seen(tokens):
    optimizer = SGDConfig(lr=0.5, momentum=0.9, clip_norm=None)
    config = run_config(tokens, parallel=ParallelConfig(), optimizer=optimizer, steps=2)
    reference = run_reference(config)
    configs = [reducing(config)] * (1 + len(FAULTS)) + [reducing(config, LAST)]
    sound, *broken = run_each(configs, 2, [None, *FAULTS, OVERWRITTEN])
    assert max(largest_error(sound, reference).values()) <= BOUND
    for fault, seen in zip([*FAULTS, OVERWRITTEN], broken, strict=True):
        errors = largest_error(seen, reference)
        assert errors["weight"] > 10 * BOUND and not torch.tensor(list(errors.values())).isnan().any(), (fault, errors)


OF_LAST = "parallel.grad_reduce=last_micro_batch"
PROOFS = [
    (2, ("train.precision=bf16", "parallel.grad_reduce_dtype=bf16", "parallel.ep=2")),
    (2, ("train.precision=fp16",)),
    (4, ("train.precision=bf16", "parallel.tp=2", "parallel.cp=2", "parallel.ep=4")),
    (4, ("train.precision=bf16", "parallel.pp=2", "parallel.ep=2", "parallel.pipeline.name=zbv")),
    (4, ("train.precision=bf16", "parallel.pp=2", "parallel.ep=2", "parallel.pipeline.name=interleaved")),
    (4, ("train.precision=bf16", "parallel.pp=2", "parallel.tp=2", "parallel.grad_reduce_dtype=bf16")),
    (4, ("train.precision=bf16", "optimizer={name: muon}", "parallel.tp=2")),
    (4, ("optimizer={name: muon}", "parallel.pp=2")),
    (2, (OF_LAST, "train.precision=bf16")),
    (4, (OF_LAST, "train.precision=bf16", "parallel.pp=2", "parallel.ep=2", "parallel.pipeline.name=zbv")),
    (4, (OF_LAST, "train.precision=fp16", "parallel.tp=2", "optimizer={name: muon}")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "overrides"), PROOFS, ids=str)
def test_reduction_in_buckets_is_proven(tmp_path, ranks, overrides):
    outcome = prove(tmp_path, (*EACH, *overrides), ranks)
    assert outcome.proven, failures(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "check"), FAULTS.items())
def test_planted_fault_is_caught_by_a_proof(tmp_path, fault, check):
    outcome = prove(tmp_path, EACH, 2, on_both_sides=(functools.partial(in_ranks, fault),))
    assert any(each.name == check and not each.passed for each in outcome.checks), failures(outcome)


BY_STEP, AS_BF16 = ("parallel.grad_reduce=step",), (*EACH, "parallel.grad_reduce_dtype=bf16")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(BY_STEP, AS_BF16), (EACH, BY_STEP, EACH)], ids=str)
def test_a_run_goes_on_across_a_change_of_the_key(tmp_path, tokens, keys):
    """Masters differ by the order of sums; no weight rounded the other way for that here."""
    whole, parts = (write_config(tmp_path, tokens, name, precision="bf16") for name in ("whole", "parts"))
    uninterrupted = train(whole, 2)
    resumed: list[dict[str, Any]] = []
    for number, overrides in enumerate(keys, 1):
        resumed = train(parts, 2, f"train.steps={6 * number // len(keys)}", *overrides)
    assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in resumed] == pytest.approx([row["loss"] for row in uninterrupted], rel=1e-5)


MUON = MuonConfig(lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "layout"), [(2, {}), (4, {"tp": 2, "ep": 2})], ids=str)
def test_muon_has_its_matrices_whole(tokens, ranks, layout):
    config = run_config(tokens, parallel=ParallelConfig(**layout), optimizer=MUON, steps=2)
    ways, reference = [reducing(config), reducing(config, LAST)], run_reference(config)
    for way, ours, counts in zip(ways, run_each(ways, ranks), run_counts(ways, ranks), strict=True):
        errors = largest_error(ours, reference)
        assert errors["loss"] <= BOUND and errors["grad_norm"] <= 1e-5, errors
        assert problems(way, counts) == []
