"""Bytes that every rank really sends in one training step, by axis and collective, against launcher.traffic.

Exactly: both are fractions. Every collective of the step, DeepSpeed's too, must be one that a term explains.
"""

import dataclasses
from typing import Any

import pytest

from launcher.closed_form.budget import modes_of
from launcher.config.tree import RunConfig
from launcher.prove.shrink import shrink_budget
from layout_runs import MOE_MODEL, run_config, write_tokens
from modeling.config import ModelConfig
from modeling.linear_attention_config import LinearAttentionConfig
from modeling.mtp_config import MTPConfig
from modeling.optimizers.config import AdamWConfig
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved
from traffic_faults import FAULTS, TWICE
from traffic_models import LATENT, PLAIN, POST_NORM
from traffic_runs import problems, run_counts

assert MOE_MODEL.moe is not None
# Sizes that no number of ranks divides, so that ZeRO pads: q_norm has 10 elements, the embedding 97 x 40.
ODD = dataclasses.replace(MOE_MODEL, vocab_size=97, d_model=40, d_ff=56)
FOUR_LAYERS = dataclasses.replace(MOE_MODEL, n_layers=4)
FOUR_KV_HEADS = dataclasses.replace(MOE_MODEL, n_kv_heads=4)
# Weights of more than 100,000 elements, which ZeRO 3 does not keep whole, dense and of experts.
LARGE = dataclasses.replace(
    MOE_MODEL, n_layers=4, vocab_size=3501, d_ff=3300, moe=dataclasses.replace(MOE_MODEL.moe, d_ff=800)
)
LARGE_UNTIED = dataclasses.replace(
    LARGE, tie_embeddings=False, moe=dataclasses.replace(MOE_MODEL.moe, d_ff=800, n_shared_experts=0)
)
LARGE_PLAIN = dataclasses.replace(PLAIN, vocab_size=3501, d_ff=3300, max_positions=3200)
# Gates of attention, in the second one so large as queries that ZeRO 3 does not keep them whole either.
GATED = dataclasses.replace(MOE_MODEL, family="none", attention_gate="headwise")
LARGE_GATED = dataclasses.replace(MOE_MODEL, family="none", attention_gate="elementwise", n_heads=4, d_head=1100)
# Linear attention, in the second one with projections that ZeRO 3 does not keep whole.
LINEAR = dataclasses.replace(
    MOE_MODEL,
    family="none",
    n_layers=4,
    full_attention_layers=(1,),
    linear_attention=LinearAttentionConfig(n_k_heads=2, n_v_heads=4, d_k=8, d_v=12),
)
LARGE_LINEAR = dataclasses.replace(
    LINEAR, linear_attention=LinearAttentionConfig(n_k_heads=2, n_v_heads=4, d_k=1300, d_v=900)
)
# Modules that predict further tokens: the embedding and the head work there, too.
FURTHER = dataclasses.replace(ODD, family="none", tie_embeddings=False, mtp=MTPConfig(depth=2))
FURTHER_TIED = dataclasses.replace(FOUR_LAYERS, family="none", mtp=MTPConfig())
FURTHER_UNTIED = dataclasses.replace(FURTHER_TIED, tie_embeddings=False)
LARGE_FURTHER = dataclasses.replace(LARGE_UNTIED, family="none", mtp=MTPConfig())
LARGE_FURTHER_TWO = dataclasses.replace(LARGE_FURTHER, mtp=MTPConfig(depth=2))
FULL, SELECTIVE, HALF = ({"recompute": mode} for mode in ("full", "selective", "feed_forward"))
BUDGET = {"activation_gib": 1.0}  # of which half of what recomputation can save is left: layers differ
BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}
RING, CHUNKS = {"cp_attention": "ring"}, {"ep_chunks": 2}
EACH = {"zero": 1, "grad_reduce": "micro_batch"}  # gradients of each micro-batch, in several buckets
AS_BF16 = {**EACH, "grad_reduce_dtype": "bf16", "precision": "bf16"}
LAST = {"zero": 1, "grad_reduce": "last_micro_batch"}
PARALLEL_KEYS = ("zero", "pipeline", "cp_attention", "ep_chunks", "grad_reduce", "grad_reduce_dtype", "tp_overlap")
BEHIND = {"tp_overlap": True}  # sums of gradients behind products


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def variant(tokens: str, model: ModelConfig, degrees: dict[str, Any], **changes: Any) -> RunConfig:
    """A run under the axes' degrees; ``changes`` are keys of parallel and train."""
    train: dict[str, Any] = {"micro_batch_size": 1 if "pp" in degrees else 2} | changes
    parallel = {key: train.pop(key) for key in PARALLEL_KEYS if key in train}
    return run_config(
        tokens,
        model=model,
        parallel=ParallelConfig(**degrees, **parallel),
        optimizer=AdamWConfig(lr=1e-3, clip_norm=0.5),
        **train,
    )


def slow(*values: Any) -> Any:
    """A row for `make test-slow` alone."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "degrees", "model", "variants"),
    [
        slow(
            4,
            {},
            ODD,
            [
                {"zero": 0},
                {"zero": 1, **BF16},
                {**AS_BF16, "micro_batch_size": 1},
                {"zero": 2, **FP16, "micro_batch_size": 1},
                {"zero": 3, **FULL, "micro_batch_size": 1},
            ],
        ),
        slow(2, {"tp": 2}, POST_NORM, [{"zero": 0}, {"zero": 1, **FULL}, {"zero": 1, **BUDGET}, BEHIND]),
        slow(2, {"tp": 2}, MOE_MODEL, [{**BEHIND, **mode} for mode in (FULL, SELECTIVE, HALF, BUDGET)]),
        slow(4, {"tp": 2, "ep": 4}, LATENT, [{**BEHIND, "zero": 2, **BF16}, {**BEHIND, **EACH, **SELECTIVE}]),
        slow(3, {}, ODD, [{**each, "global_batch_size": 6} for each in (EACH, AS_BF16, {**LAST, **FP16})]),
        slow(4, {"cp": 2, "tp": 2}, FOUR_LAYERS, [{**EACH, **RING, **FULL}, AS_BF16, {**LAST, **BF16}]),
        slow(4, {"ep": 2}, ODD, [{**EACH, **SELECTIVE}, AS_BF16, LAST]),
        slow(4, {"tp": 2, "ep": 4}, MOE_MODEL, [EACH, {**AS_BF16, **FULL}]),
        slow(
            8,
            {"tp": 2, "pp": 2, "cp": 2},
            FOUR_LAYERS,
            [
                EACH,
                {**AS_BF16, **FULL},
                {**EACH, "pipeline": Interleaved()},
                {**EACH, **RING, "pipeline": ZBV()},
                {**AS_BF16, "pipeline": DualPipeV()},
                {**LAST, "pipeline": ZBV()},
            ],
        ),
        slow(8, {"tp": 2, "pp": 2, "ep": 4}, FURTHER_UNTIED, [EACH, {**AS_BF16, "pipeline": ZBV()}]),
        slow(4, {"pp": 2}, FURTHER_TIED, [EACH, {**LAST, **BF16}]),
        slow(2, {"tp": 2}, POST_NORM, [{"zero": 1, **SELECTIVE}, {"zero": 3, **BF16}]),
        slow(2, {"tp": 2}, GATED, [{"zero": 1, **SELECTIVE}, {**BEHIND, "zero": 1}, {"zero": 3, **BF16}]),
        (2, {"cp": 2}, LINEAR, [{"zero": 1, **RING, **SELECTIVE}]),
        slow(4, {"cp": 2, "tp": 2}, LINEAR, [{"zero": 1}, {**BEHIND, "zero": 1, **FULL}, {"zero": 3, **BF16, **RING}]),
        slow(2, {"pp": 2}, LINEAR, [{"zero": 1}, {"zero": 3, **FULL}, {"zero": 1, "pipeline": ZBV(), **SELECTIVE}]),
        slow(2, {}, LARGE_LINEAR, [{"zero": 3}, {"zero": 3, **SELECTIVE}, {"zero": 3, **FULL}, {"zero": 3, **HALF}]),
        slow(2, {}, LARGE_GATED, [{"zero": 3}, {"zero": 3, **SELECTIVE}, {"zero": 3, **FULL}, {"zero": 3, **HALF}]),
        slow(2, {}, ODD, [{"zero": 1}, {"zero": 1, **FP16}, {"zero": 2, **BF16}, {"zero": 3, **FP16}]),
        slow(3, {}, ODD, [{"zero": zero, "global_batch_size": 6} for zero in (1, 2, 3)]),
        slow(2, {"tp": 2}, MOE_MODEL, [{"zero": 0}, {"zero": 1, **FP16, **SELECTIVE}, {"zero": 3, **BF16, **FULL}]),
        slow(4, {"tp": 4}, FOUR_KV_HEADS, [{"zero": 0}, {"zero": 2, **BF16, **FULL}, {"zero": 3}]),
        slow(2, {"cp": 2}, MOE_MODEL, [{"zero": 1, **BF16}, {"zero": 2, **RING}, {"zero": 3, **FULL}]),
        slow(
            4,
            {"cp": 4},
            ODD,
            [{"zero": 1, **FULL}, {"zero": 2, **RING, **BF16, **FULL}, {"zero": 3, **RING, **SELECTIVE}],
        ),
        slow(2, {"ep": 2}, ODD, [{"zero": 0}, {"zero": 1, **FP16}, {"zero": 3, **SELECTIVE}]),
        slow(2, {"ep": 2}, ODD, [{"zero": 1, **CHUNKS, **FULL}, {"zero": 3, **CHUNKS, **BF16}]),
        slow(4, {"tp": 2, "pp": 2, "ep": 2}, FOUR_LAYERS, [{"zero": 1, **CHUNKS, "pipeline": ZBV()}]),
        slow(4, {"ep": 4}, ODD, [{"zero": 0}, {"zero": 2, **BF16, **FULL}, {"zero": 3, **FP16}]),
        slow(4, {"ep": 2}, ODD, [{"zero": 0}, {"zero": 1, **BF16}, {"zero": 2, **FULL}, {"zero": 3, **FP16}]),
        slow(4, {"cp": 2, "tp": 2}, FOUR_LAYERS, [{"zero": 1, **BUDGET}, {"zero": 2, **RING, **BUDGET}]),
        slow(4, {"ep": 2}, FOUR_LAYERS, [{"zero": 1, **BUDGET}, {"zero": 3, **BF16, **BUDGET}]),
        slow(4, {"tp": 2, "ep": 2}, MOE_MODEL, [{"zero": 0}, {"zero": 2, **BF16, **SELECTIVE}]),
        slow(4, {"tp": 2, "ep": 4}, MOE_MODEL, [{"zero": 0}, {"zero": 2, **BF16, **FULL}, {"zero": 3}]),
        slow(2, {"pp": 2}, FOUR_LAYERS, [{"zero": 0}, {"zero": 1, "pipeline": Interleaved(), **FULL}]),
        slow(4, {"pp": 4}, FOUR_LAYERS, [{"zero": 1}, {"zero": 1, **BF16, **FULL}]),
        (
            8,
            {"tp": 2, "pp": 2, "cp": 2},
            FOUR_LAYERS,
            [{"zero": 1, **RING, **FULL, "pipeline": ZBV()}],
        ),
        slow(
            8,
            {"tp": 2, "pp": 2, "cp": 2},
            FOUR_LAYERS,
            [
                {"zero": 0},
                {"zero": 2, **BF16, **FULL},
                {"zero": 3, **SELECTIVE},
                {"zero": 1, **RING, "pipeline": Interleaved()},
                {"zero": 1, "pipeline": ZBV()},
                {"zero": 2, **BF16, **FULL, "pipeline": DualPipeV()},
                {"zero": 1, **FP16, **SELECTIVE, "pipeline": DualPipeV()},
            ],
        ),
        slow(8, {"tp": 2, "pp": 2, "ep": 4}, FOUR_LAYERS, [{"zero": 1, **BF16}, {"zero": 2, **FULL}, {"zero": 3}]),
        slow(4, {"tp": 2, "cp": 2}, LATENT, [{"zero": 1}, {"zero": 2, **RING, **FULL}]),
        slow(
            4, {"tp": 2, "cp": 2}, PLAIN, [{"zero": 0}, {"zero": 1, **RING, **SELECTIVE}, {"zero": 3, **BF16, **FULL}]
        ),
        slow(
            4,
            {"tp": 2, "pp": 2},
            PLAIN,
            [{"zero": 2, **BF16, **FULL}, {"zero": 3}, {"zero": 1, "pipeline": DualPipeV(), **SELECTIVE}],
        ),
        slow(4, {}, LARGE_PLAIN, [{"zero": 3, "micro_batch_size": 1}, {"zero": 3, **SELECTIVE}, {"zero": 3, **FULL}]),
        slow(
            4,
            {"pp": 2},
            LARGE_PLAIN,
            [
                {"zero": 3, "pipeline": pipeline, **recompute}
                for pipeline in (ParallelConfig().pipeline, Interleaved())
                for recompute in ({}, SELECTIVE, HALF, FULL, BUDGET)
            ],
        ),
        slow(4, {"ep": 2}, LARGE, [{"zero": 3}, {"zero": 3, **BF16, **FULL, "micro_batch_size": 1}]),
        slow(4, {}, LARGE_UNTIED, [{"zero": 3, "micro_batch_size": 1}, {"zero": 3, **SELECTIVE}]),
        slow(
            4,
            {"pp": 2},
            LARGE,
            [
                {"zero": 3, "pipeline": pipeline, **recompute}
                for pipeline in (ParallelConfig().pipeline, Interleaved())
                for recompute in ({}, SELECTIVE, HALF, FULL, BUDGET)
            ],
        ),
        slow(4, {"pp": 2}, LARGE_UNTIED, [{"zero": 3}]),
        slow(4, {"pp": 2}, LARGE_UNTIED, [{"zero": 3, **BF16, **FULL}]),
        slow(2, {}, FURTHER, [{"zero": 1, **BF16}, {"zero": 2}, {"zero": 3, "micro_batch_size": 1}]),
        slow(2, {"tp": 2}, FURTHER_TIED, [{"zero": 0}, {"zero": 1, **FULL}, {"zero": 3, **BF16, **SELECTIVE}]),
        slow(
            8,
            {"tp": 2, "pp": 2, "cp": 2},
            FURTHER_UNTIED,
            [{"zero": 0}, {"zero": 1, **RING, "pipeline": ZBV()}, {"zero": 2, **BF16, **FULL}, {"zero": 3}],
        ),
        slow(4, {"tp": 2, "pp": 2}, FURTHER_TIED, [{"zero": 1, "pipeline": Interleaved()}]),
        slow(2, {}, LARGE_FURTHER, [{"zero": 3, "micro_batch_size": 1}, {"zero": 3, **SELECTIVE}, {"zero": 3, **FULL}]),
        slow(2, {}, LARGE_FURTHER_TWO, [{"zero": 3, "micro_batch_size": 1}, {"zero": 3, **FULL}]),
        slow(4, {"pp": 2}, LARGE_FURTHER, [{"zero": 3}, {"zero": 3, **FULL}, {"zero": 3, "pipeline": Interleaved()}]),
        slow(4, {"pp": 2}, LARGE_FURTHER_TWO, [{"zero": 3}]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bytes_are_those_of_the_closed_forms(tokens, ranks, degrees, model, variants):
    configs = [variant(tokens, model, degrees, **changes) for changes in variants]
    configs = [each if each.train.activation_gib is None else shrink_budget(each, ranks) for each in configs]
    assert all(len(set(modes_of(each, ranks))) > 1 for each in configs if each.train.activation_gib is not None)
    found = {}
    for changes, config, seen in zip(variants, configs, run_counts(configs, ranks), strict=True):
        found |= {str(changes): wrong} if (wrong := problems(config, seen)) else {}
    assert not found, found


def test_planted_a_bucket_reduced_twice_is_noticed(tokens):
    config = variant(tokens, MOE_MODEL, {}, **EACH)
    sound, broken = run_counts([config, config], 2, [None, TWICE])
    assert problems(config, sound) == []
    assert any("replicas, gradients, reduce-scatter" in line for line in problems(config, broken))


@pytest.mark.slow
def test_planted_collectives_too_many_or_too_few_are_noticed(tokens):
    """Without ep, tp's two ranks both hold the experts: their gradients are the ones that are reduced."""
    config = variant(tokens, MOE_MODEL, {"tp": 2}, zero=0)
    results = run_counts([config] * (len(FAULTS) + 1), 2, [None, *FAULTS])
    assert problems(config, results[0]) == []
    for (fault, said), seen in zip(FAULTS.items(), results[1:], strict=True):
        wrong = problems(config, seen)
        assert any(said in line for line in wrong), (fault, wrong)
