"""parallel.ep_overlap on and off: the same losses, norms and weights to the last bit, and those of one process.

Tolerance as in test_zero.py; on is the default, so all other tests of ep run with it.
"""

import dataclasses
from typing import Any

import pytest

from layout_runs import MOE_MODEL, assert_same_bits, largest_error, run_config, run_layout, run_reference, write_tokens
from parallel.config import ParallelConfig
from parallel.pipeline.config import ZBV, DualPipeV
from rotating import fast_where

FOUR_LAYERS = dataclasses.replace(MOE_MODEL, n_layers=4)
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"tp": 2, "ep": 2}, {}),
    (2, {"ep": 2}, {"recompute": "full"}),
    (2, {"tp": 2, "ep": 2}, {"recompute": "feed_forward"}),
    (2, {"ep": 2}, {"recompute": "selective"}),
    (2, {"ep": 2}, {"precision": "bf16"}),
    (4, {"cp": 2, "tp": 2, "ep": 4}, {}),
    (2, {"tp": 2, "ep": 2, "zero": 3}, {}),
    (4, {"pp": 2, "ep": 2, "pipeline": ZBV()}, {"model": FOUR_LAYERS}),
    (
        4,
        {"pp": 2, "ep": 2, "pipeline": DualPipeV()},
        {"model": FOUR_LAYERS, "recompute": "full", "micro_batch_size": 1},
    ),
]


@pytest.mark.parametrize(("ranks", "layout", "train"), fast_where(CASES, lambda *case: case == CASES[0]), ids=str)
def test_overlap_changes_no_bit(tmp_path, ranks, layout, train):
    parallel = ParallelConfig(**layout)
    config = run_config(write_tokens(tmp_path), parallel=parallel, steps=2, **train)
    without = dataclasses.replace(config, parallel=dataclasses.replace(parallel, ep_overlap=False))
    found, wanted = run_layout(config, ranks), run_layout(without, ranks)
    assert_same_bits(found, wanted)
    if config.train.precision == "fp32":
        errors = largest_error(wanted, run_reference(config))
        assert max(errors.values()) <= 1e-6, errors
