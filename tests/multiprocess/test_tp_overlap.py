"""parallel.tp_overlap on and off: the same losses, norms and weights to the last bit, and those of one process.

Tolerance as in test_zero.py.
"""

import dataclasses
from typing import Any

import pytest

from layout_runs import (
    DENSE_MODEL,
    MOE_MODEL,
    assert_same_bits,
    largest_error,
    run_config,
    run_layout,
    run_reference,
    write_tokens,
)
from modeling.config import MLAConfig
from parallel.config import ParallelConfig
from parallel.pipeline.config import Interleaved
from prove_runs import failures, prove
from rotating import fast_where

BIASES = dataclasses.replace(DENSE_MODEL, family="none", qkv_bias=True, o_bias=True, ff_bias=True, parallel_block=True)
LATENT = dataclasses.replace(
    MOE_MODEL,
    family="deepseek_v3",
    n_kv_heads=4,
    qk_norm=False,
    mla=MLAConfig(q_lora_rank=12, kv_lora_rank=16, d_nope=8, d_rope=4, d_v=8),
)
MODELS = {
    "experts": MOE_MODEL,
    "four layers": dataclasses.replace(MOE_MODEL, n_layers=4),
    "biases": BIASES,
    "latent": LATENT,
}
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"ep": 2}, {"recompute": "selective"}),
    (2, {}, {}),
    (2, {}, {"recompute": "full"}),
    (2, {}, {"recompute": "feed_forward"}),
    (2, {"ep": 2, "ep_overlap": False}, {"precision": "bf16"}),
    (2, {}, {"precision": "fp16", "recompute": "selective"}),
    (2, {}, {"model": "biases"}),
    (2, {}, {"model": "biases", "recompute": "selective", "precision": "bf16"}),
    (2, {}, {"model": "biases", "precision": "fp8"}),
    (2, {"ep": 2}, {"model": "latent"}),
    (2, {}, {"model": "latent", "recompute": "selective"}),
    (2, {"zero": 0}, {}),
    (4, {"zero": 2}, {"precision": "bf16"}),
    (4, {"grad_reduce": "micro_batch"}, {"micro_batch_size": 1}),
    (4, {"grad_reduce": "last_micro_batch", "ep": 4}, {"precision": "bf16"}),
    (4, {"cp": 2, "ep": 4}, {}),
    (4, {"cp": 2, "cp_attention": "ring"}, {"recompute": "full"}),
    (4, {"pp": 2}, {"model": "four layers", "micro_batch_size": 1}),
    (4, {"pp": 2, "pipeline": Interleaved()}, {"model": "four layers", "recompute": "full", "micro_batch_size": 1}),
    (8, {"pp": 2, "ep": 4}, {"model": "four layers", "recompute": "selective", "micro_batch_size": 1}),
    (2, {}, {"offload_activations": True}),
    (2, {"ep": 2}, {"offload_activations": True, "recompute": "selective"}),
]


@pytest.mark.parametrize(("ranks", "layout", "train"), fast_where(CASES, lambda *case: case == CASES[0]), ids=str)
def test_overlap_changes_no_bit(tmp_path, ranks, layout, train):
    parallel = ParallelConfig(tp=2, tp_overlap=True, **layout)
    model = MODELS[train.get("model", "experts")]
    config = run_config(write_tokens(tmp_path), **{**train, "model": model}, parallel=parallel, steps=2)
    without = dataclasses.replace(config, parallel=dataclasses.replace(parallel, tp_overlap=False))
    small_sizes = config.train.offload_activations
    found, wanted = (run_layout(each, ranks, small_sizes=small_sizes) for each in (config, without))
    assert_same_bits(found, wanted)
    if config.train.precision == "fp32":
        errors = largest_error(found, run_reference(config))
        assert max(errors.values()) <= 1e-6, errors


PROOFS = [
    (2, ("train.activation_gib=64",)),
    (2, ("train.precision=fp8", "parallel.ep=2", "parallel.zero=2")),
    (4, ("parallel.zero=2", "train.offload_activations=true", "train.precision=bf16")),
    (8, ("parallel.pp=2", "parallel.cp=2", "parallel.ep=4", "train.recompute=selective")),
    (4, ("model.mtp.depth=1", "parallel.cp=2", "parallel.cp_attention=ring")),
    (4, ("optimizer={name: muon}", "train.recompute=full")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "overrides"), PROOFS, ids=str)
def test_overlap_is_proven(tmp_path, ranks, overrides):
    outcome = prove(tmp_path, ("parallel.tp=2", "parallel.tp_overlap=true", *overrides), ranks)
    assert outcome.proven, failures(outcome)
