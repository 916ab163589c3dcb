"""parallel.ep_chunks above one: the same losses, norms and weights as with one, to the last bit, and one process's.

Tolerance as in test_zero.py.
"""

import dataclasses
from typing import Any

import pytest

from launcher.prove.shrink import shrink_budget
from layout_runs import MOE_MODEL, assert_same_bits, largest_error, run_config, run_layout, run_reference, write_tokens
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV, DualPipeV, Interleaved
from rotating import fast_where

assert MOE_MODEL.moe is not None
MODEL = dataclasses.replace(MOE_MODEL, moe=dataclasses.replace(MOE_MODEL.moe, n_experts=8))
FOUR_LAYERS = dataclasses.replace(MODEL, n_layers=4)
IN_8_BITS = dataclasses.replace(  # widths of whole units of 16 bytes
    MODEL, n_kv_heads=4, d_ff=64, moe=dataclasses.replace(MODEL.moe, n_experts=8, d_ff=32)
)
BUDGET = {"activation_gib": 1.0}  # of which half of what recomputation can save is left: layers differ
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"tp": 2, "ep": 2, "ep_chunks": 3}, {}),  # of 2, 1 and 1 experts
    (2, {"ep": 2, "ep_chunks": 4}, {"recompute": "full"}),
    (2, {"tp": 2, "ep": 2, "ep_chunks": 2}, {"recompute": "feed_forward"}),
    (2, {"ep": 2, "ep_chunks": 3}, {"recompute": "selective"}),
    (2, {"tp": 2, "ep": 2, "ep_chunks": 2}, {"model": FOUR_LAYERS, **BUDGET}),
    (2, {"tp": 2, "ep": 2, "ep_chunks": 3}, {"recompute": "selective", "offload_activations": True}),
    (2, {"ep": 2, "ep_chunks": 2}, {"precision": "bf16"}),
    (2, {"tp": 2, "ep": 2, "ep_chunks": 2}, {"precision": "fp8", "model": IN_8_BITS}),
    (2, {"ep": 2, "ep_chunks": 2, "zero": 3}, {"precision": "bf16", "recompute": "full"}),
    (4, {"cp": 2, "tp": 2, "ep": 4, "ep_chunks": 2}, {}),
    (4, {"ep": 2, "ep_chunks": 2, "grad_reduce": "micro_batch"}, {"precision": "bf16", "micro_batch_size": 1}),
    (2, {"tp": 2, "ep": 2, "zero": 3, "ep_chunks": 3}, {}),
    (2, {"ep": 2, "zero": 3, "ep_chunks": 2}, {"recompute": "selective", "offload_activations": True}),
    (4, {"pp": 2, "ep": 2, "pipeline": Interleaved(), "ep_chunks": 2}, {"model": FOUR_LAYERS}),
    (4, {"pp": 2, "ep": 2, "pipeline": ZBV(), "ep_chunks": 3}, {"model": FOUR_LAYERS}),
    (
        4,
        {"pp": 2, "ep": 2, "pipeline": DualPipeV(), "ep_chunks": 2},
        {"model": FOUR_LAYERS, "recompute": "full", "micro_batch_size": 1},
    ),
    (
        4,
        {"pp": 2, "ep": 2, "pipeline": DualPipeV(), "ep_chunks": 4},
        {"model": FOUR_LAYERS, "recompute": "selective", "micro_batch_size": 1},
    ),
]


@pytest.mark.parametrize(("ranks", "layout", "train"), fast_where(CASES, lambda *case: case == CASES[0]), ids=str)
def test_chunks_change_no_bit(tmp_path, ranks, layout, train):
    parallel = ParallelConfig(**layout)
    settings: dict[str, Any] = {"model": MODEL, "steps": 2, **train}
    config = run_config(write_tokens(tmp_path), parallel=parallel, **settings)
    config = config if config.train.activation_gib is None else shrink_budget(config, ranks)
    whole = dataclasses.replace(config, parallel=dataclasses.replace(parallel, ep_chunks=1))
    sizes = {"small_sizes": config.train.offload_activations}
    found, wanted = run_layout(config, ranks, **sizes), run_layout(whole, ranks, **sizes)
    assert_same_bits(found, wanted)
    if config.train.precision == "fp32":
        errors = largest_error(wanted, run_reference(config))
        assert max(errors.values()) <= 1e-6, errors
